"""``art-backends train --command``: programs of any language as agents, trained by their own reports and by rewards."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)

JAVASCRIPT = """
import { writeFileSync } from "node:fs";
import { text } from "node:stream/consumers";

const scenario = JSON.parse(await text(process.stdin));
const messages = scenario.messages;
let said = "";
for (const more of ["Go on.", null]) {
  const reply = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { authorization: `Bearer ${process.env.OPENAI_API_KEY}`, "content-type": "application/json" },
    body: JSON.stringify({ model: "gpt-4o-mini", messages, max_completion_tokens: 8 }),
  });
  if (!reply.ok) throw new Error(await reply.text());
  const { message } = (await reply.json()).choices[0];
  said += message.content;
  messages.push(message, { role: "user", content: more });
}
console.log(said);
const letters = (said.match(/[a-z]/gi) ?? []).length;
writeFileSync(process.env.ART_REPORT, JSON.stringify({ reward: letters / (said.length || 1), success: letters > 3 }));
"""

SHELL = """
printf '{"model": "claude", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}' > body.$$
curl --silent --fail --noproxy '*' -H "x-api-key: $ANTHROPIC_API_KEY" -H 'content-type: application/json' \\
  --data @body.$$ "$ANTHROPIC_BASE_URL/v1/messages"
"""

REWARD = """
import json

def score(run):
    if run.error is not None:
        return 0.0
    text = "".join(block["text"] for block in json.loads(run.output["stdout"])["content"])
    return sum(character.isalpha() for character in text) / (len(text) or 1)
"""

FAILING = "import sys; print('half'); sys.exit(3)"


def arguments(project: Any, command: str, *more: str) -> list[str]:
    found = ["train", "--command", command, "--scenarios", "tasks.jsonl", "--folder", str(project.run)]
    found += ["--base-model", str(project.model), "--steps", "2", "--groups-per-step", "2", "--group-size", "3"]
    return [*found, "--rank", "2", "--alpha", "4", "--threads", "1", "--learning-rate", "0.01", *more]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node here")
def test_a_javascript_agent_is_trained_by_its_own_report(project: Any) -> None:
    (project.path / "agent.mjs").write_text(JAVASCRIPT)
    done = project.call("art-backends", *arguments(project, "node agent.mjs", "--held-out", "0.2"), seconds=250)
    assert done.code == 0, done.err
    report = project.report()
    assert (report["version"], report["steps"], report["faults"]) == ("policy@2", 2, 0)
    assert report["trained_success"] is not None
    rows = [json.loads(line) for line in (project.run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row.get("outcome") == "committed"]
    assert [row["calls/excluded"] for row in steps] == [0, 0]
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-3 for row in steps)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_a_shell_script_is_trained_by_a_reward_function(project: Any) -> None:
    (project.path / "agent.sh").write_text(SHELL)
    (project.path / "scores.py").write_text(REWARD)
    done = project.call("art-backends", *arguments(project, "sh agent.sh", "--reward", "scores:score"), seconds=250)
    assert done.code == 0, done.err
    assert project.report()["version"] == "policy@2"


@pytest.mark.slow
def test_a_program_that_fails_is_an_agent_that_fails(project: Any) -> None:
    (project.path / "agent.py").write_text(FAILING)
    done = project.call("art-backends", *arguments(project, f"{sys.executable} agent.py"), seconds=250)
    assert done.code == 2
    assert "the agent failed before its first model call in every rollout: CommandError: exit code 3" in done.err
    assert "Traceback" not in done.err, "there is nothing of the program's in ours"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--command", "no-such-program"], "no program 'no-such-program'"),
        (["--reward", "scores"], "give module:function"),
        (["--scenarios", "nothing.jsonl"], "nothing.jsonl"),
    ],
)
def test_what_is_wrong_is_one_line(project: Any, more: list[str], said: str) -> None:
    done = project.call("art-backends", *arguments(project, "sh agent.sh", *more))
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert said in done.err
    assert not Path(project.run).exists()
