"""Questions that take several searches: each search finds what the next one needs, and the last finds the answer.

    search[The Silent Orchard]   -> the passages that fit best: "The Silent Orchard is an opera by Ada Brunfield ..."
    search[Ada Brunfield]        -> "... born in Eskford in 1871 ..."
    finish[Eskford]              ends the episode

An answer is right if it is the same text as the answer known, after SQuAD's normalisation (Rajpurkar et al. 2016): small letters,
no punctuation but in numbers, no articles, single blanks. That is success; with `score` the reward is that (1 or 0) or the F1 of
the words. People, towns and works are invented here, so nothing can be known without searching.

Left out: a retriever with embeddings (RAGEN's server has one), and answers judged by a model.
"""

import re
from collections import Counter

from nanoragen.envs.base import Game, check_whole, held_out
from nanoragen.envs.retrieval import parse_action
from nanoragen.envs.search_corpus import from_files, generated, normal

MAX_TEXT = 1_000  # characters of a passage that are shown


class SearchQA(Game):
    """
    hops        searches that a question takes: 2, 3, or 0 for any number
    people      of the generated corpus, 20 to 150; it has as many works, and half as many towns
    corpus_seed another number, another corpus
    passages    shown for a search, 1 to 10
    score       reward of an answer: "em" (1 if right, else 0) or "f1"
    data        file of questions instead (JSON or JSONL), HotpotQA's or {"question": ..., "answer": ...} a row
    eval_data   file that evaluation seeds draw from, so that no question of `data` is evaluated on; "": the same file
    corpus      JSONL of {"title": ..., "text": ...} or {"contents": "title\\ntext"} to search; "": the rows' own `context`
    """

    max_turns = 6
    max_actions_per_turn = 1
    instruction = (
        "Answer the question with facts that you search for, one search after the other. Actions: search[words] shows passages; "
        "finish[answer] ends with a short answer. Reply <think>your reasoning</think><answer>search[Ada Brunfield]</answer>"
    )

    def __init__(self, hops=0, people=60, corpus_seed=0, passages=3, score="em", data="", eval_data="", corpus=""):
        super().__init__()
        if hops not in (0, 2, 3):
            raise ValueError(f"hops: {hops!r} is not possible in search_qa; valid: 2, 3, or 0 for both")
        check_whole("search_qa", 20, 150, people=people)
        check_whole("search_qa", 1, 10, passages=passages)
        check_whole("search_qa", 0, corpus_seed=corpus_seed)
        if score not in ("em", "f1"):
            raise ValueError(f"score: {score!r}; valid: em, f1")
        for key, value in (("eval_data", eval_data), ("corpus", corpus)):
            if value and not data:
                raise ValueError(f"{key}: {value} without data; valid: with data=FILE")
        self.passages, self.score = passages, score
        self.library = from_files(str(data), str(eval_data), str(corpus)) if data else generated(people, corpus_seed)
        self.questions, self.held_out = (
            [q for q in questions if hops in (0, len(q.chain))] for questions in (self.library.questions, self.library.held_out)
        )
        if not (self.questions and self.held_out):
            raise ValueError(f"hops: no question of {data} takes {hops} searches; valid: 0 for any number")

    def _start(self, seed):
        questions = self.held_out if held_out(seed) else self.questions
        self.question = questions[self.np_random.integers(len(questions))]
        self.shown, self.seen = None, set()  # numbers of passages: on the page (None: no search yet), and ever
        self.answered, self.right = False, False

    def step(self, action):
        verb, argument = parse_action(action)
        valid = verb in ("search", "finish") and not self.answered
        before, reward = (self.shown, self.answered), 0.0
        if valid and verb == "search":
            self.shown = self.library.index.search(argument, self.passages)
            self.seen |= set(self.shown)
        elif valid:
            self.answered, self.right = True, any(exact(argument, a) for a in self.question.answers)
            reward = float(self.right) if self.score == "em" else max(f1(argument, a) for a in self.question.answers)
        effective = (self.shown, self.answered) != before
        return self._result(reward, self.answered, self.right, valid, effective)

    def render(self):
        lines = [f"question: {self.question.text}"]
        if self.shown is not None:
            lines += [self.library.texts[n][:MAX_TEXT] for n in self.shown] or ["nothing found"]
        return "\n".join(lines)

    # -- solver --------------------------------------------------------------------------------------------------------

    def random_action(self, rng) -> str:
        """A search for, or the answer, the title of some passage."""
        verb = "search" if rng.random() < 0.5 else "finish"
        return f"{verb}[{self.library.titles[rng.integers(len(self.library.titles))]}]"

    def best_actions(self) -> list[str]:
        """A search for the first passage of the chain that was not seen yet; the answer when all were."""
        if self.answered:
            return []
        left = [n for n in self.question.chain if n not in self.seen]
        if not left:
            return [f"finish[{self.question.answers[0]}]"]
        title, text = self.library.titles[left[0]], self.library.texts[left[0]]
        return [f"search[{title if left[0] in self.library.index.search(title, self.passages) else text}]"]


# -- judging -----------------------------------------------------------------------------------------------------------


def exact(answer: str, known: str) -> bool:
    """Equal in SQuAD's normalisation, which takes 18.71 and -1871 for 1871; so numbers must be equal as they are written, too."""
    return normal(answer) == normal(known) != "" and _numbers(answer) == _numbers(known)


def _numbers(text: str) -> list[str]:
    return re.findall(r"-?\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text))


def f1(answer: str, known: str) -> float:
    """F1 of the words of two answers, in [0, 1]; yes and no (HotpotQA) are right or wrong, never in part."""
    a, k = normal(answer), normal(known)
    common = (Counter(a.split()) & Counter(k.split())).total()
    if common == 0 or (a != k and {a, k} & {"yes", "no", "noanswer"}):
        return 0.0
    precision, recall = common / len(a.split()), common / len(k.split())
    return 2 * precision * recall / (precision + recall)
