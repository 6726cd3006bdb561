"""GGUF exports of tiny random models, read back by transformers and, where it is there, by llama.cpp."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from art_backends.cli import main
from art_backends.config import TrainConfig
from art_backends.errors import AdapterError, ConfigError
from art_backends.models import digest_of
from art_backends.server.folder import PolicyFile
from art_backends.training.versions import encode_json
from art_backends.worker.merge import merge
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

CONFIGS: dict[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "mistral": MistralConfig}
CHATML = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXTS = [
    "Hello, hello world!  It's 12345 o'clock,\n\n  isn't it?\tThe THE'S 3.14159",
    "<|im_start|>user\nwhere is 4417?<|im_end|>\n<|im_start|>assistant\n",
    '<tool_call>{"name": "stock"}</tool_call> a<|endoftext|>b',
    "naïve café — 你好，世界 🙂🙂 \u00a0x\u0301 \x00\x7f ½ ²",
    " leading and trailing  ",
    "\n",
    "a\x01b ß ÿ 𐐷",  # with bytes that SmolLM's tokenizers have no token for
]
PROMPT = list(range(20, 40))
NAME = "policy-3"


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


CUTS: dict[str, Callable[[], Any]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": lambda: split(WORDS + r"\p{N}{1,3}" + REST),
    "qwen2": lambda: split(WORDS + r"\p{N}" + REST),
}


def make_tokenizer(cut: Any = "gpt-2", *, bos: bool = False, **changes: Any) -> Any:
    """Byte-level BPE that learned the texts of this test, with control tokens and tags of tool calls."""
    core = Tokenizer(models.BPE(ignore_merges=cut == "llama-bpe", unk_token=changes.get("unk_token")))
    core.pre_tokenizer = CUTS[cut]() if isinstance(cut, str) else cut
    core.normalizer = changes.pop("normalizer", normalizers.NFC() if cut == "qwen2" else None)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=changes.pop("size", 330),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=[] if cut == "smollm" else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TEXTS[:-1] * 3, trainer)
    core.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<tool_call>", "</tool_call>")])
    core.add_tokens(changes.pop("tokens", []))
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", pair="$A $B", special_tokens=[("<|endoftext|>", 0)]
        )
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"} | changes
    fast = PreTrainedTokenizerFast(tokenizer_object=core, **names)
    fast.chat_template = CHATML
    return fast


@dataclass
class Case:
    """A base model on disk, an adapter of it, and what PEFT says of both together."""

    base: Path
    adapter: Path
    out: Path
    tokenizer: Any
    adapted: Any

    def export(self, form: str | None = NAME) -> Path:
        folder = self.out / (form or "merged")
        folder.mkdir(parents=True)
        merge(str(self.base), digest_of(self.base), self.adapter, folder, gguf=form)
        return folder


def make_case(
    folder: Path, kind: str = "llama", tokenizer: Any = None, dtype: torch.dtype = torch.float32, **settings: Any
) -> Case:
    tokenizer = tokenizer or make_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer) + 5,  # rows that no token has
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "rms_norm_eps": 3e-5,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        base = AutoModelForCausalLM.from_config(CONFIGS[kind](**(sizes | settings)))
        with torch.no_grad():
            for parameter in base.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(6)
                else:  # norms and biases that are not all the same
                    parameter.add_(torch.rand_like(parameter) * 0.3)
        base.to(dtype).save_pretrained(folder / "base")
        tokenizer.save_pretrained(folder / "base")
        base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).eval()
        lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "k_proj", "o_proj", "up_proj"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's, of names that will go and of a base model that has no hub's name
            adapted: Any = get_peft_model(base, lora).eval()
            with torch.no_grad():
                for name, parameter in adapted.named_parameters():
                    if "lora_B" in name:
                        parameter.normal_(std=0.2)
            adapted.save_pretrained(folder / "adapter")
    return Case(folder / "base", folder / "adapter", folder / "out", tokenizer, adapted)


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=f"{NAME}.gguf", dtype=torch.float32).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.tensor([PROMPT])).logits
    return found


def greedy(model: Any) -> list[int]:
    with torch.no_grad():
        ids = model.generate(
            input_ids=torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return ids[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


def fields(folder: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(folder / f"{NAME}.gguf").fields.items()}


@dataclass
class Kind:
    """A kind of model to try."""

    kind: str = "llama"
    cut: str = "gpt-2"
    dtype: torch.dtype = torch.float32
    bos: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "llama-tied": Kind(settings={"tie_word_embeddings": True}),
    "llama-untied-own-head-size": Kind(cut="smollm", settings={"head_dim": 16, "rope_theta": 5e4}),
    "llama-all-heads-bfloat16": Kind(
        cut="llama-bpe", bos=True, dtype=torch.bfloat16, settings={"num_key_value_heads": 4}
    ),
    "llama-one-key-head-float16": Kind(dtype=torch.float16, settings={"num_key_value_heads": 1}),
    "qwen2": Kind("qwen2", "qwen2", settings={"tie_word_embeddings": True}),
    "qwen3": Kind("qwen3", "qwen2", settings={"head_dim": 128}),  # transformers reads no other of a qwen3 file
}


@pytest.mark.parametrize("name", KINDS)
def test_transformers_reads_the_same_model_and_the_same_tokens(tmp_path, name):
    chosen = KINDS[name]
    case = make_case(tmp_path, chosen.kind, make_tokenizer(chosen.cut, bos=chosen.bos), chosen.dtype, **chosen.settings)
    folder = case.export()
    assert [path.name for path in folder.iterdir()] == [f"{NAME}.gguf"]
    found = load(folder)
    assert found.config.tie_word_embeddings is chosen.settings.get("tie_word_embeddings", False)
    assert fields(folder)["tokenizer.ggml.pre"] == chosen.cut

    # the same bits as the merged safetensors, and what PEFT says
    merged = AutoModelForCausalLM.from_pretrained(case.export(None), dtype=torch.float32).eval()
    wanted = merged.state_dict()
    assert found.state_dict().keys() == wanted.keys()
    for key, tensor in found.state_dict().items():
        assert torch.equal(tensor, wanted[key]), key
    bound = 1e-4 if chosen.dtype == torch.float32 else 0.5
    assert (logits(found) - logits(case.adapted)).abs().max() < bound
    assert (logits(found) - logits(merged)).abs().max() < 1e-4
    assert greedy(found) == greedy(merged)
    with case.adapted.disable_adapter():
        assert (logits(found) - logits(case.adapted)).abs().max() > 2 * bound

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=f"{NAME}.gguf")
    for text in TEXTS:
        ids = case.tokenizer.encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.encode(text, add_special_tokens=False) == case.tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == case.tokenizer.decode(ids)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    talk = [{"role": "user", "content": "Hello, hello"}]
    assert tokenizer.apply_chat_template(talk) == case.tokenizer.apply_chat_template(talk)


def test_what_the_file_says_and_that_it_names_no_path(tmp_path):
    case = make_case(tmp_path, tokenizer=make_tokenizer("smollm"), rope_theta=123456.0)
    settings = json.loads((case.base / "generation_config.json").read_text())
    (case.base / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [2, 0]}))
    folder = case.export()
    said = fields(folder)
    tokens, kinds = said.pop("tokenizer.ggml.tokens"), said.pop("tokenizer.ggml.token_type")
    assert {key.removeprefix("llama."): value for key, value in said.items() if key.startswith("llama.")} == {
        "vocab_size": len(tokens),
        "context_length": 512,
        "embedding_length": 32,
        "block_count": 2,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "attention.value_length": 8,
        "attention.layer_norm_rms_epsilon": pytest.approx(3e-5),
        "rope.dimension_count": 8,
        "rope.freq_base": 123456.0,
    }
    assert (said["general.architecture"], said["general.name"], said["general.file_type"]) == ("llama", NAME, 0)
    assert (said["tokenizer.ggml.model"], said["tokenizer.ggml.pre"]) == ("gpt2", "smollm")
    assert said["tokenizer.chat_template"] == CHATML
    assert (said["tokenizer.ggml.add_bos_token"], said["tokenizer.ggml.add_eos_token"]) == (False, False)
    assert (said["tokenizer.ggml.bos_token_id"], said["tokenizer.ggml.eos_token_id"]) == (0, 2)
    assert said["tokenizer.ggml.eot_token_id"] == 0  # the other end that the model's generation settings name
    assert [tokens[index] for index in (0, 1, 2)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert kinds[:4] == [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL]
    assert kinds[tokens.index("<tool_call>")] == gguf.TokenType.USER_DEFINED
    assert kinds[-5:] == [gguf.TokenType.UNUSED] * 5
    whole = (folder / f"{NAME}.gguf").read_bytes()
    assert str(tmp_path).encode() not in whole
    assert b"/home" not in whole


def test_llama_3_rope_scaling_stands_as_factors_that_llama_cpp_divides_by(tmp_path):
    scaling = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    case = make_case(tmp_path, rope_parameters={**scaling, "original_max_position_embeddings": 64}, head_dim=16)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(case.export() / f"{NAME}.gguf").tensors}
    factors = torch.from_numpy(found["rope_freqs.weight"].data.copy())
    plain = 1e4 ** -(torch.arange(0, 16, 2) / 16)
    assert torch.allclose(plain / factors, case.adapted.get_base_model().model.rotary_emb.inv_freq, rtol=1e-5)
    assert factors[0] == 1
    assert factors[-1] == pytest.approx(8)


SPIECE = pre_tokenizers.Metaspace()
REFUSED: dict[str, tuple[str, Callable[[], Any], dict[str, Any], str]] = {
    "architecture": ("mistral", make_tokenizer, {}, "'mistral'; supported are llama, qwen2, qwen3"),
    "biases": ("llama", make_tokenizer, {"attention_bias": True}, "attention_bias is True"),
    "activation": ("llama", make_tokenizer, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "window": ("qwen2", lambda: make_tokenizer("qwen2"), {"use_sliding_window": True}, "use_sliding_window is True"),
    "rope": (
        "llama",
        make_tokenizer,
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        "rope_type must be default or llama3",
    ),
    "sentencepiece": ("llama", lambda: make_tokenizer(SPIECE), {}, "no byte-level BPE"),
    "cut": ("llama", lambda: make_tokenizer(split(r"\s+|\S+")), {}, "no byte-level BPE"),
    "normaliser": ("llama", lambda: make_tokenizer(normalizer=normalizers.Lowercase()), {}, "no byte-level BPE"),
    "unknown": (
        "llama",
        lambda: make_tokenizer("smollm", unk_token="<|endoftext|>"),
        {},
        "no byte-level BPE",
    ),
    "spaces": (
        "llama",
        lambda: make_tokenizer(tokens=[AddedToken("<mask>", lstrip=True)]),
        {},
        "'<mask>' depends on the text around it",
    ),
    "no end": ("llama", lambda: make_tokenizer(eos_token=None), {"eos_token_id": None}, "no token that ends a text"),
    "rows": ("llama", make_tokenizer, {"vocab_size": 100}, "only 100 rows of embeddings"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_said_exactly_is_refused_before_anything_is_written(tmp_path, name):
    kind, tokenizer, settings, why = REFUSED[name]
    case = make_case(tmp_path, kind, tokenizer(), **settings)
    with pytest.raises(ConfigError, match=r"--merged and turn that folder into GGUF with llama\.cpp") as caught:
        case.export()
    assert why in str(caught.value)
    assert list((case.out / NAME).iterdir()) == []


def test_tokens_put_around_a_text_are_told_or_refused(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|im_start|>", pair="$A $B", special_tokens=[("<|im_start|>", 1)]
    )
    with pytest.raises(ConfigError, match="adds other tokens to a text"):
        make_case(tmp_path, tokenizer=tokenizer).export()


def test_an_interrupted_export_leaves_no_half_file(tmp_path, monkeypatch):
    case = make_case(tmp_path)

    def full(writer: gguf.GGUFWriter) -> None:
        assert [path.name for path in (case.out / NAME).iterdir()] == [f".tmp-{NAME}.gguf"]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", full)
    with pytest.raises(OSError, match="No space left"):
        case.export()
    assert list((case.out / NAME).iterdir()) == []


def test_other_weights_are_refused(tmp_path):
    case = make_case(tmp_path)
    case.out.mkdir()
    with pytest.raises(AdapterError, match="these are other weights"):
        merge(str(case.base), "0" * 64, case.adapter, case.out, gguf=NAME)
    assert list(case.out.iterdir()) == []


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_command(tmp_path, capsys, kind):
    """A file and a card; where it is refused, not even the folder."""
    case = make_case(tmp_path, kind)
    run, out = tmp_path / "run", tmp_path / "exported"
    run.mkdir()
    PolicyFile.create(run, TrainConfig(folder=run, base_model=str(case.base)), digest_of(case.base))
    version = run / "versions/policy@3"
    version.parent.mkdir()
    case.adapter.rename(version)
    state = {"format": 1, "policy": "policy", "version": 3, "step": 3, "rollout_ids": [], "config": {"rank": 2}}
    (version / "state.json").write_bytes(encode_json(state))
    export = ["versions", "export", "3", str(out), "--gguf", "--folder", str(run)]
    if kind == "llama":
        assert main(export) == 0
        assert {path.name for path in out.iterdir()} == {f"{NAME}.gguf", "README.md"}
        card = (out / "README.md").read_text()
        assert "library_name: gguf" in card
        assert f"llama-server -m {NAME}.gguf" in card
        assert str(tmp_path) not in card
        assert (logits(load(out)) - logits(case.adapted)).abs().max() < 1e-4
    else:
        assert main(export) == 2
        assert "its architecture is 'mistral'" in capsys.readouterr().err
        assert not out.exists()


def test_one_form_at_a_time(capsys):
    with pytest.raises(SystemExit):
        main(["versions", "export", "3", "out", "--gguf", "--merged"])
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize("name", KINDS)
def test_llama_cpp_reads_the_same_tokens_and_says_the_same(tmp_path, name):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (it has no ready wheel)")
    chosen = KINDS[name]
    case = make_case(tmp_path, chosen.kind, make_tokenizer(chosen.cut, bos=chosen.bos), chosen.dtype, **chosen.settings)
    llama = llama_cpp.Llama(str(case.export() / f"{NAME}.gguf"), n_ctx=256, n_threads=1, verbose=False)
    for text in TEXTS:
        ids = case.tokenizer.encode(text, add_special_tokens=False)
        assert llama.tokenize(text.encode(), add_bos=False, special=True) == ids
    merged = AutoModelForCausalLM.from_pretrained(case.export(None), dtype=torch.float32).eval()
    llama.reset()
    said: list[int] = []
    for token in llama.generate(PROMPT, temp=0.0):
        said.append(int(token))
        if len(said) == 16:
            break
    assert said == greedy(merged)
