"""preheat generate and preheat chat as a user types them: texts, chats, checkpoints, and what is said where it cannot be done."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from preheat.cli import main

from .conftest import Command

INTERRUPTED = "interrupted; the text so far stays in the conversation"
BEGIN = "Once upon a time, there was a little girl named Lily"


@pytest.fixture
def stories(data_folder: Path) -> str:
    return str(data_folder / "stories260K-hf")


@pytest.fixture
def here(preheat: Command, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of `preheat`, for commands that are refused in this process: none of them needs one of its own."""
    monkeypatch.chdir(preheat.folder)
    monkeypatch.setenv("PREHEAT_CACHE", preheat.environment["PREHEAT_CACHE"])
    return preheat.folder


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> tuple[str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out, error = capsys.readouterr()
    assert ended.value.code == code, error
    return out, error


def _chat(preheat: Command, *arguments: str, said: str, code: int = 0) -> tuple[str, str]:
    process = preheat.start("chat", *arguments, said=said)
    out, error = process.communicate(timeout=300)
    assert process.returncode == code, f"exit {process.returncode}\n{out}\n{error}"
    assert "Traceback" not in error
    return out, error


def test_texts_are_written_in_order_and_figures_stand_beside(preheat: Command, stories: str) -> None:
    (preheat.folder / "p.txt").write_text("Tom had a red ball.\n\nThe cat\n")
    out, error = preheat("generate", stories, "--prompt", "", "--file", "p.txt", "--tokens", "24", "--stop", "\n")
    texts = out.split("─" * 40 + "\n")
    assert texts[0].startswith(BEGIN)
    assert [t.startswith(b) for t, b in zip(texts[1:], ("Tom had a red ball.", "The cat"), strict=True)] == [True, True]
    assert "tokens/s, peak memory" in error
    both = preheat.here.json("generate", stories, stories, "--prompt", "Tom had a red ball.", "--tokens", "24")["texts"]
    assert [t["text"] for t in both] == [texts[1].removeprefix("Tom had a red ball.").rstrip("\n")] * 2


def test_questions_of_validation_rows_are_answered_before_and_after(preheat: Command, stories: str) -> None:
    rows = [{"instruction": f"Say {n}", "output": f"It is {n}."} for n in range(40)]
    (preheat.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = "data={source: rows.jsonl, validation: 0.2, template: alpaca}"
    changes = [
        f"model={{path: {stories}}}",
        data,
        "batch.seq_len=128",
        "evaluate.rows=2",
        "stop.max_steps=2",
        "checkpoint.every=0",
    ]
    preheat.here(
        *[
            "train",
            "r.yaml",
            "--set",
            "sample={rows: 2, max_new_tokens: 6}",
            *(part for c in changes for part in ("--set", c)),
        ]
    )
    run = preheat.folder / "runs/small"
    samples = json.loads((run / "samples.json").read_text())
    said = {row["instruction"]: row["output"] for row in rows}
    assert len(samples) == 2
    for sample in samples:
        question = sample["prompt"].split("### Instruction:\n")[1].split("\n")[0]
        assert sample["expected"].strip() == said[question]
        assert sample["before"] is not None
        assert sample["text"] is not None
    texts = preheat.here.json(
        "generate",
        str(run),
        *(p for s in samples for p in ("--prompt", s["prompt"].split("### Instruction:\n")[1].split("\n")[0])),
        "--tokens",
        "6",
    )["texts"]
    assert [t["text"] for t in texts] == [s["text"] for s in samples], (
        "the question is what generate asks by the run's template"
    )
    assert "The row's own answer" in (run / "report.html").read_text()
    with_text = [*changes[:1], "sample.rows=2", "stop.max_steps=2"]
    error = preheat.here(*["train", "r.yaml", "--out", "t", *(p for c in with_text for p in ("--set", c))], code=2)[1]
    assert "sample.rows: the validation rows hold no question with an answer" in error


def test_checkpoints_of_a_run_and_samples_before_and_after(preheat: Command, stories: str) -> None:
    sample = "sample={prompts: [The cat, The dog], max_new_tokens: 12}"
    preheat.here(
        "train",
        "r.yaml",
        "--set",
        f"model={{path: {stories}}}",
        "--set",
        "techniques={lora: {rank: 4}}",
        "--set",
        sample,
    )
    run = preheat.folder / "runs/small"
    samples = json.loads((run / "samples.json").read_text())
    assert [s["prompt"] for s in samples] == ["The cat", "The dog"]
    base = preheat.here.json("generate", stories, "--prompt", "The cat", "--prompt", "The dog", "--tokens", "12")[
        "texts"
    ]
    assert [s["before"] for s in samples] == [t["text"] for t in base]
    last = preheat.here.json("generate", "runs/small", "--prompt", "The cat", "--prompt", "The dog", "--tokens", "12")[
        "texts"
    ]
    assert [s["text"] for s in samples] == [t["text"] for t in last] != [s["before"] for s in samples]
    page = (run / "report.html").read_text()
    assert "Before training" in page
    assert "After training" in page
    by_step = preheat.here.json("generate", "runs/small", "--checkpoint", "10", "--prompt", "The cat", "--tokens", "12")
    by_path = preheat.here.json("generate", "runs/small/checkpoints/step-10", "--prompt", "The cat", "--tokens", "12")
    assert (by_step["step"], by_step["text"]) == (by_path["step"], by_path["text"]) == (10, by_step["text"])
    assert (
        "has no checkpoint of step 7; there are: 10, 12"
        in preheat.here("generate", "runs/small", "--checkpoint", "7", code=1)[1]
    )
    asked = preheat.here("generate", "runs/small/checkpoints/step-10", "--checkpoint", "12", code=1)[1]
    assert "is the checkpoint of step 10, not 12" in asked


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--prompt", "word " * 600], 2, "positions; shorten it"),
        (["--chat"], 2, "no chat template; name the one that it was trained with, e.g. --template chatml"),
        (["--template", "chatlm"], 2, "did you mean 'chatml'?"),
        (["--file", "empty.txt"], 4, "holds no prompt"),
        (["--file", "bad.jsonl"], 4, "bad.jsonl:2: is not a prompt"),
        (
            ["--file", "answered.jsonl", "--template", "chatml"],
            4,
            "answered.jsonl:1: the chat ends with the assistant's message",
        ),
        (["--file", "chat.jsonl"], 2, "no chat template"),
        (["--top-p", "0.9"], 2, "--top-p: 0.9 filters sampled tokens, and temperature 0 does not sample"),
        (["--stop", ""], 2, "--stop: an empty string"),
        (["--checkpoint", "3"], 1, "is not a run"),
    ],
    ids=lambda value: " ".join(value)[:24] if isinstance(value, list) else "",
)
def test_what_cannot_be_written_is_said_in_one_line(
    here: Path, stories: str, arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "empty.txt").write_text("\n \n")
    (here / "bad.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    (here / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    (here / "answered.jsonl").write_text('[{"role": "assistant", "content": "Hi"}]\n')
    out, error = _refused(capsys, "generate", stories, *arguments, code=code)
    assert words in error
    assert out == ""
    assert len([line for line in error.splitlines() if line.startswith("error:")]) == 1
    assert "Token indices" not in error


def test_neither_a_run_nor_a_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("generate", "chat"):
        assert "neither a run" in _refused(capsys, command, "text", code=1)[1]


def test_samples_that_leave_no_room_are_refused_before_training(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for sample, words in (
        (f"sample={{prompts: [{'word ' * 60}]}}", "sample.prompts: prompt 1: has "),
        ("sample={prompts: [[{role: user, content: Hi}]]}", "sample.prompts: prompt 1: is a chat"),
        ("sample={prompts: [a], min_p: 0.1}", "sample.min_p: 0.1 filters sampled tokens"),
    ):
        assert words in _refused(capsys, "train", "r.yaml", "--set", sample, code=2)[1]
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("said", "arguments", "words"),
    [
        ("word " * 600, ["--template", "chatml"], "shorten it"),
        ("/rest\n", ["--template", "chatml"], "no such command; did you mean '/reset'?"),
        ("/save t.jsonl\n", ["--template", "chatml"], "the conversation is empty"),
        ("Hi\n", [], "no chat template; name the one"),
    ],
    ids=["long", "command", "save", "template"],
)
def test_chat_says_what_it_cannot(
    here: Path,
    stories: str,
    said: str,
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    assert words in _refused(capsys, "chat", stories, *arguments, code=2)[1]


def test_chat_from_a_pipe(preheat: Command, stories: str) -> None:
    talk = "Tell me of a dog\n/system Be kind\nWhat next?\n/save talk.jsonl\n/reset\n\nTell me of a dog\n/quit\nnever said\n"
    out, error = _chat(preheat, stories, "--template", "alpaca", "--tokens", "12", said=talk)
    saved = json.loads((preheat.folder / "talk.jsonl").read_text())["messages"]
    assert [m["role"] for m in saved] == ["system", "user", "assistant", "user", "assistant"]
    first, second = saved[2]["content"], saved[4]["content"]
    assert out.startswith(f"{first}\n{second}\n")
    assert "chat, template alpaca" in error
    assert "system: Be kind" in error
    assert error.count("tokens/s") == 3
    # A chat saved is a prompt that can be asked again: without its last answer it gives that answer.
    (preheat.folder / "again.jsonl").write_text(json.dumps({"messages": saved[:-1]}) + "\n")
    again = preheat.here.json("generate", stories, "--file", "again.jsonl", "--template", "alpaca", "--tokens", "12")
    assert again["text"] == second


def test_a_long_chat_drops_its_oldest_turns_and_says_so(preheat: Command, stories: str) -> None:
    said = "".join(f"tell me a long story about {n} dogs in the park\n" for n in range(5))
    _, error = preheat.here("chat", stories, "--template", "chatml", "--tokens", "60", said=said)
    assert "the oldest 2 messages were dropped" in error


def test_a_run_trained_on_chats_is_asked_by_its_template(preheat: Command, stories: str) -> None:
    rows = [
        [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n}."}]
        for n in range(40)
    ]
    (preheat.folder / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    settings = [
        f"model={{path: {stories}}}",
        "data={source: chats.jsonl, template: alpaca, validation: 0.1}",
        "batch.seq_len=64",
    ]
    sample = 'sample={prompts: ["What is 3?", [{role: user, content: "What is 3?"}]], max_new_tokens: 8}'
    sets = [
        word
        for setting in (*settings, "techniques={lora: {rank: 4}}", "stop.max_steps=3", sample)
        for word in ("--set", setting)
    ]
    preheat.here("train", "r.yaml", *sets)
    plain, chat = json.loads((preheat.folder / "runs/small/samples.json").read_text())
    assert (plain["before"], plain["text"]) == (chat["before"], chat["text"]), "a text is the user's message of a chat"
    out, error = preheat.here("generate", "runs/small", "--prompt", "What is 3?", "--tokens", "8")
    assert out == chat["text"] + "\n"
    assert "chat, alpaca, as the run was trained" in error
    plain_out, error = preheat.here("generate", "runs/small", "--prompt", "What is 3?", "--tokens", "8", "--no-chat")
    assert "plain text" in error
    assert plain_out.startswith("What is 3?")
    assert preheat.here("chat", "runs/small", "--tokens", "8", said="What is 3?\n")[0] == out
    # For programs: the same answer as records, token by token; a bad request is an error and ends nothing.
    said = '{"mesage": "x"}\n{"message": "What is 3?"}\n{"reset": true}\n{"system": ""}\n{"message": "What is 3?"}\n'
    lines = preheat.here("chat", "runs/small", "--json", "--tokens", "8", said=said)[0].splitlines()
    ready, error, *parts = [json.loads(line) for line in lines]
    assert ready["ready"]["step"] == 3
    assert ready["ready"]["format"] == "chat, alpaca, as the run was trained"
    assert "must have one of the keys message, system, reset" in error["error"]
    message = {"message": "What is 3?"}
    assert [part["request"] for part in parts if "request" in part] == [
        message,
        {"reset": True},
        {"system": ""},
        message,
    ]
    answers = [part["answer"]["text"] for part in parts if "answer" in part]
    assert answers == [chat["text"]] * 2
    assert "".join(part.get("text", "") for part in parts) == 2 * chat["text"]
    before = preheat.here(
        "chat", "runs/small", "--json", "--before", "--tokens", "8", said='{"message": "What is 3?"}\n'
    )
    assert json.loads(before[0].splitlines()[-1])["answer"]["text"] == chat["before"]


def test_ctrl_c_ends_an_answer_of_a_chat_for_programs_and_nothing_between_answers(preheat: Command) -> None:
    settings = ("stop.max_steps=2", "model.max_positions=100000")
    preheat.here("train", "r.yaml", *(f"--set={pair}" for pair in settings))
    with subprocess.Popen(
        [sys.executable, "-m", "preheat", "chat", "runs/small", "--json", "--tokens", "99000"],
        cwd=preheat.folder,
        env=preheat.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        try:
            assert "ready" in json.loads(chat.stdout.readline())
            for _ in range(2):
                chat.send_signal(signal.SIGINT)  # meant for an answer that has just ended
                chat.stdin.write('{"message": "the"}\n')
                chat.stdin.flush()
                assert json.loads(chat.stdout.readline()) == {"request": {"message": "the"}}
                assert "text" in json.loads(chat.stdout.readline())
                chat.send_signal(signal.SIGINT)
                rest = iter(lambda: json.loads(chat.stdout.readline()), {"error": INTERRUPTED})
                assert all("text" in record for record in rest)
            chat.stdin.close()
            assert chat.wait(60) == 0
        finally:
            chat.kill()
