"""math_qa: generated problems against an independent reader, the data sets' own formats, tries and rewards."""

import json
import re

import pytest

from nanoragen.envs import math_judge, math_qa
from nanoragen.envs.base import EVAL_SEEDS, TRAIN_SEEDS
from nanoragen.envs.math_qa import THINGS, MathQA, question_and_answer
from nanoragen.rollout.chat import parse_reply

GSM8K = {"question": "Ann has 40 pens and gets 2. How many?", "answer": "40 + 2 = <<40+2=42>>42 pens.\n#### 1,042"}
META = {
    "query": "What is half of 3?",
    "response": "Half of 3 is 3/2.\n#### 1.5\nThe answer is: \\frac{3}{2}",
    "type": "MATH_Rephrased",
}
MATH = {"problem": "Simplify $\\sqrt{8}$.", "solution": "So $\\boxed{1}$, no: $\\boxed{2\\sqrt{2}}$.", "level": "Level 2"}


def solve(text):
    """The answer of a generated problem, read from its sentences alone."""
    *story, question = re.findall(r"[^.?]+[.?]", text)
    thing, who = re.match(r" ?How many (\w+) does (\w+) have now\?", question).groups()
    amount = None
    for sentence in story:
        numbers = [int(n) for n in re.findall(r"\d+", sentence)]
        if match := re.match(rf" ?{who} has (\d+) {thing}\.", sentence):
            assert amount is None
            amount = int(match[1])
        elif " finds " in sentence:
            amount += numbers[0]
        elif " gives " in sentence:
            amount -= numbers[0]
        elif " bags of " in sentence:
            amount += numbers[0] * numbers[1]
        elif " equal heaps " in sentence:
            assert amount % numbers[0] == 0
            amount //= numbers[0]
        elif " times as many" in sentence:
            amount *= numbers[0]
        else:  # about somebody else's other things
            assert re.match(r" ?\w+ has \d+ \w+\.", sentence) and who not in sentence and thing not in sentence
        assert amount >= 1
    return amount


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
def test_generated_problems(level):
    env, texts, kinds = MathQA(level=level), set(), set()
    for seed in range(300):
        text, _ = env.reset(seed=seed)
        assert env.answer == str(solve(text)) and text.count(".") == 1 + level + (level >= 4)
        texts.add(text)
        kinds |= {k for k in ("finds", "bags", "gives", "heaps", "times") if k in text}
    assert len(texts) > 290 and len(kinds) == 5 and len(set(THINGS)) == len(THINGS)


def test_every_try_is_worth_half_of_the_one_before():
    env = MathQA()
    question, _ = env.reset(seed=0)
    wrong = str(int(env.answer) + 1)
    text, reward, terminated, _, info = env.step(wrong)
    assert text == f"{question}\nNot right, think again." and (reward, terminated, info["success"]) == (0.0, False, False)
    assert env.step("no idea")[4]["action_is_valid"] is False  # costs nothing but the turn
    text, reward, terminated, _, info = env.step(f"\\boxed{{{env.answer}.0}}")
    assert (text, reward, terminated, info["success"]) == (question, 0.5, True, True)
    assert env.step(env.answer)[1:3] == (0.0, True)  # paid once


def test_the_question_again_and_other_ways_to_say_everything_are_wrong():
    env = MathQA(level=5)
    for seed in range(50):
        question, _ = env.reset(seed=seed)
        for text in (
            question,
            f"{question} {env.answer}",
            " ".join(map(str, range(60))),
            f"{env.answer} or {env.answer}1",
            "0-999",
        ):
            assert env.step(text)[1] == 0.0


def test_e8_only_the_answer_tag_counts():
    env = MathQA()
    env.reset(seed=3)
    reply = parse_reply(f"surely {env.answer}, \\boxed{{{env.answer}}}</think><answer>{int(env.answer) + 5}</answer>")
    assert [env.step(a)[1] for a in reply.actions] == [0.0]


@pytest.mark.parametrize(
    "row, question, answer",
    [(GSM8K, GSM8K["question"], "1,042"), (META, META["query"], "\\frac{3}{2}"), (MATH, MATH["problem"], "2\\sqrt{2}")],
)
def test_rows_of_the_data_sets(row, question, answer):
    assert question_and_answer(row) == (question, answer)


@pytest.mark.parametrize(
    "end, answer", [("\\fbox{7}.", "7"), ("$x = \\boxed 9$.", "9"), ("\\boxed {12}", "12"), ("$\\boxed \\frac12$", "\\frac12")]
)
def test_boxes_as_some_rows_of_math_have_them(end, answer):
    assert question_and_answer({"problem": "p", "solution": f"So {end}"}) == ("p", answer)


def test_a_file_with_a_byte_order_mark_and_the_line_ends_of_windows(tmp_path):
    (tmp_path / "d").write_bytes(b"\xef\xbb\xbf" + f"{json.dumps(GSM8K)}\r\n{json.dumps(META)}\r\n".encode())
    assert len(MathQA(data=str(tmp_path / "d")).rows) == 2


def test_e14_text_after_the_answer_line():
    long = {"question": "q", "answer": "#### 42\n" + "x" * 500}
    assert question_and_answer(long) == ("q", "42")


def write(path, rows, lines):
    path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("lines", [True, False])
def test_data_files(tmp_path, lines):
    env = MathQA(data=write(tmp_path / "d.json", [GSM8K, META], lines))
    seen = {env.reset(seed=s)[0]: env.answer for s in range(40)}
    assert seen == {GSM8K["question"]: "1,042", META["query"]: "\\frac{3}{2}"}
    for seed, right in ((s, a) for s in range(10) for a in ("1042", "1.5")):
        env.reset(seed=seed)
        assert env.step(right)[4]["success"] is ((env.answer == "1,042") == (right == "1042"))


def test_evaluation_questions_come_from_their_own_file(tmp_path):
    train, test = write(tmp_path / "a", [GSM8K], True), write(tmp_path / "b", [META], True)
    env = MathQA(data=train, eval_data=test)
    assert {env.reset(seed=s)[0] for s in EVAL_SEEDS[:20]} == {META["query"]}
    assert {env.reset(seed=s)[0] for s in TRAIN_SEEDS[:20]} == {GSM8K["question"]}
    with pytest.raises(ValueError, match="^eval_data: .*valid: "):
        MathQA(eval_data=test)


@pytest.mark.skipif(not math_judge.installed(), reason="math-verify is not installed (extra envs)")
def test_expressions_are_judged_too(tmp_path):
    env = MathQA(data=write(tmp_path / "d", [MATH], True))
    env.reset(seed=0)
    assert env.step("3\\sqrt{2}")[4] == {"success": False, "action_is_valid": True, "action_is_effective": True}
    assert env.step("\\sqrt8")[1] == 0.5


def test_expressions_without_the_library_name_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(math_qa, "installed", lambda: False)
    MathQA(data=write(tmp_path / "a", [GSM8K, META], True)).reset(seed=0)  # numbers need no library
    with pytest.raises(ValueError, match=r"^math_qa: .*math-verify; valid: pip install 'nanoragen\[envs\]'"):
        MathQA(data=write(tmp_path / "b", [MATH], True))


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "has no rows"),
        ("[]", "has no rows"),
        ("{", "neither JSON nor JSONL"),
        ("[{]", "neither JSON nor JSONL"),
        (json.dumps(GSM8K, indent=2), "is one JSON object over several lines; "),
        (json.dumps({"data": [GSM8K]}, indent=2), "is one JSON object over several lines; "),
        (json.dumps(GSM8K, indent=2) * 2, "no row that can be used"),
        (json.dumps({**GSM8K, "answer": "#### " + "x" * 201}), "row 1: the answer 'x*.* could never be found right"),
        (json.dumps({**GSM8K, "answer": "#### ."}), "row 1: the answer '.' could never be found right"),
        (json.dumps({**GSM8K, "question": "half \ud83d"}), "row 1: .*surrogates not allowed"),
        ('{"a": 1}', "row 1: neither question/answer"),
        ("3", "row 1: neither question/answer"),
        ('{"question": "q", "answer": "42"}', "row 1: no answer"),
        ('{"problem": "p", "solution": "\\\\boxed{1"}', "row 1: no answer"),
        ('{"query": "p", "response": "The answer is: "}', "row 1: no answer"),
        ('{"question": null, "answer": "#### 4"}', "row 1: 'question' is None"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, text, message):
    (tmp_path / "d").write_text(text)
    with pytest.raises(ValueError, match=f"^data: .*{message}.*valid: ") as error:
        MathQA(data=str(tmp_path / "d"))
    assert "\n" not in str(error.value)


BROKEN = ['{"question": "q"', '{"question": "q", "answer": "#### 4", "n": %s}' % ("9" * 5000), "3", "[1]", '{"question": 3, "answer": "#### 4"}',
          '{"question": "q", "answer": []}', "[" * 100_000, '{"question": "q", "answer": "#### \\ud800"}']  # fmt: skip


@pytest.mark.parametrize("lines", [True, False])
def test_rows_that_cannot_be_used_are_skipped_and_counted_in_one_line(tmp_path, capsys, lines):
    bad = BROKEN if lines else BROKEN[1:6]
    rows = [json.dumps(GSM8K), *bad, json.dumps(META)]
    (tmp_path / "d").write_text("\n".join(rows) if lines else f"[{','.join(rows)}]")
    for _ in range(2):  # every episode has an environment of its own, the line is said once
        assert [q for q, _ in MathQA(data=str(tmp_path / "d")).rows] == [GSM8K["question"], META["query"]]
    said = capsys.readouterr().err
    count = f"data: {tmp_path / 'd'}: {len(bad)} of {len(bad) + 2} rows cannot be used and are skipped; row 2: "
    assert said.startswith(count) and said.count("\n") == 1 and len(said) < 600, said


def test_bytes_that_are_no_text_spoil_their_row_alone(tmp_path, capsys):
    (tmp_path / "d").write_bytes(json.dumps(GSM8K).encode() + b'\n{"question": "\xff", "answer": "#### 4"}\n')
    assert len(MathQA(data=str(tmp_path / "d")).rows) == 1 and "1 of 2 rows" in capsys.readouterr().err


def test_whole_characters_outside_the_first_plane_are_text(tmp_path):
    (tmp_path / "d").write_text(json.dumps({**GSM8K, "question": "\U0001f600?"}))
    assert MathQA(data=str(tmp_path / "d")).rows == [("\U0001f600?", "1,042")]


def test_a_file_that_changed_is_read_again(tmp_path):
    path = write(tmp_path / "d", [GSM8K], True)
    assert len(MathQA(data=path).rows) == 1
    write(tmp_path / "d", [GSM8K, META], True)
    assert len(MathQA(data=path).rows) == 2


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="^data: .*cannot be read.*valid: "):
        MathQA(data=str(tmp_path / "none"))


@pytest.mark.parametrize("level", [0, 6, 2.0, "2"])
def test_impossible_levels(level):
    with pytest.raises(ValueError, match="^level: .*valid: 1 to 5"):
        MathQA(level=level)
