"""Secrets in texts: what is found, what is left, and what a call with one looks like when it is written."""

import logging
import random
import string

import pytest
from art_backends.config import Privacy
from art_backends.errors import ConfigError
from art_backends.redaction import FORMATS, RedactingFormatter, Redactor
from art_backends.trajectories import Call, CallStatus, CaptureLevel, Choice

RANDOM = random.Random(7)


def some(count: int, letters: str = string.ascii_letters + string.digits) -> str:
    return "".join(RANDOM.choices(letters, k=count))


SECRETS = {
    "private_key": f"-----BEGIN RSA PRIVATE KEY-----\n{some(64)}\n{some(64)}\n-----END RSA PRIVATE KEY-----",
    "anthropic": f"sk-ant-api03-{some(90)}",
    "openrouter": f"sk-or-v1-{some(64)}",
    "langfuse": f"sk-lf-{some(8)}-{some(4)}-{some(4)}-{some(12)}",
    "openai": f"sk-proj-{some(48)}",
    "stripe": f"sk_live_{some(24)}",
    "google": f"AIza{some(35)}",
    "aws": f"AKIA{some(16, string.ascii_uppercase)}",
    "github": f"ghp_{some(36)}",
    "gitlab": f"glpat-{some(20)}",
    "slack": f"xoxb-{some(11, string.digits)}-{some(24)}",
    "huggingface": f"hf_{some(34)}",
    "groq": f"gsk_{some(52)}",
    "langsmith": f"lsv2_pt_{some(32)}_{some(10)}",
    "npm": f"npm_{some(36)}",
    "pypi": f"pypi-AgE{some(60)}",
    "art": f"art-{some(43)}",
    "jwt": f"eyJ{some(20)}.eyJ{some(30)}.{some(43)}",
    "bearer": some(40),
    "password_in_url": some(12),
}
AROUND = {"bearer": "Authorization: Bearer {}", "password_in_url": "postgres://shop:{}@db.internal:5432/shop"}


def test_every_known_format_has_an_example_here() -> None:
    assert SECRETS.keys() == {item.name for item in FORMATS}


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_of_each_format_is_replaced_wherever_it_stands(name: str) -> None:
    secret = SECRETS[name]
    text = AROUND.get(name, "the key is {}, keep it").format(secret)
    value = {
        "messages": [{"role": "tool", "content": text}, {"arguments": '{"key": "' + text.replace("\n", "\\n") + '"}'}]
    }
    found = str(Redactor().value(value))
    assert secret not in found
    assert secret.replace("\n", "\\n") not in found
    assert found.count(f"[redacted {name}]") == 2
    kept = Redactor(Privacy(without=[item.name for item in FORMATS]))
    assert kept.value(value) is value


def test_what_stands_around_a_secret_stays() -> None:
    redactor = Redactor()
    assert redactor.text("postgres://shop:hunter22@db/x") == "postgres://shop:[redacted password_in_url]@db/x"
    assert redactor.text(f"Bearer {'a' * 30}.") == "Bearer [redacted bearer]"


@pytest.mark.parametrize(
    "text",
    [
        "Ask sk-learn's documentation, or task-based planning",
        "see https://example.org/a:b and mailto:x@example.org",
        "risk-averse customers with a bearer bond",
        "AKIAN is a name, eyJ a beginning",
        "art-backends serve --folder .art/run",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    value = {"content": text}
    assert Redactor().value(value) is value


def test_patterns_and_values_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_PASSWORD", 'corr"ect horse')
    redactor = Redactor(Privacy(patterns={"ticket": r"no (?P<secret>TCK-\d{4})"}, secrets_of=["SHOP_PASSWORD"]))
    assert redactor.text("no TCK-1234 yet") == "no [redacted ticket] yet"
    assert redactor.text('it is corr"ect horse') == "it is [redacted SHOP_PASSWORD]"
    assert redactor.value(['{"password": "corr\\"ect horse"}']) == ['{"password": "[redacted SHOP_PASSWORD]"}']
    off = Redactor(Privacy(redact=False, patterns={"ticket": r"TCK-\d{4}"}))
    assert off.text(f"TCK-1234 {SECRETS['github']}") == f"[redacted ticket] {SECRETS['github']}"


@pytest.mark.parametrize(
    ("privacy", "said"),
    [
        (Privacy(patterns={"x": "("}), r"privacy\.patterns\.x: '\(' is no regular expression"),
        (Privacy(patterns={"x": "a*"}), r"privacy\.patterns\.x: 'a\*' matches the empty text"),
        (Privacy(without=["nonsense"]), r"privacy\.without: nonsense is no known format"),
        (Privacy(secrets_of=["NOT_SET_ANYWHERE"]), r"the environment has no NOT_SET_ANYWHERE"),
        (Privacy(secrets_of=["SHORT"]), r"SHORT has fewer than 8 characters"),
    ],
)
def test_what_cannot_be_looked_for_is_refused(privacy: Privacy, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Redactor(privacy, {"SHORT": "abc"})


def call(content: str, answer: str = "yes") -> Call:
    return Call(
        id="c",
        status=CallStatus.OK,
        request={"messages": [{"role": "user", "content": content}]},
        prompt_token_ids=[1, 2, 3],
        choices=[Choice(message={"content": answer}, token_ids=[4, 5], logprobs=[-1.0, -2.0])],
        capture=CaptureLevel.TOKENS,
    )


@pytest.mark.parametrize(("content", "answer"), [(SECRETS["github"], "yes"), ("hi", SECRETS["github"])])
def test_a_call_with_a_secret_keeps_no_ids_and_does_not_train(content: str, answer: str) -> None:
    written = Redactor().call(call(content, answer))
    assert SECRETS["github"] not in written.model_dump_json()
    assert written.prompt_token_ids == []
    assert written.choices[0].token_ids == []
    assert written.choices[0].logprobs == []
    assert written.excluded == "redacted"
    assert written.capture is CaptureLevel.TEXT


def test_a_call_without_one_is_the_same_object_and_an_error_alone_costs_no_ids() -> None:
    clean = call("hi")
    assert Redactor().call(clean) is clean
    failed = clean.model_copy(update={"error": f"401 wrong key {SECRETS['openai']}"})
    written = Redactor().call(failed)
    assert written.error == "401 wrong key [redacted openai]"
    assert written.prompt_token_ids == [1, 2, 3]
    assert written.excluded is None


def test_text_that_is_no_proper_unicode_and_numbers_that_are_too_long() -> None:
    value = {"a": "\ud800" + SECRETS["github"], "b": 2**70}
    assert Redactor().value(value) == {"a": "\ud800[redacted github]", "b": 2**70}


def test_a_log_line_and_its_traceback() -> None:
    formatter = RedactingFormatter(logging.Formatter("%(levelname)s %(message)s"), Redactor())
    try:
        raise ValueError(f"bad key {SECRETS['github']}")
    except ValueError as error:
        record = logging.LogRecord(
            "x", logging.ERROR, __file__, 1, "failed with %s", (SECRETS["google"],), (type(error), error, None)
        )
    line = formatter.format(record)
    assert line.startswith("ERROR failed with [redacted google]")
    assert "ValueError: bad key [redacted github]" in line
