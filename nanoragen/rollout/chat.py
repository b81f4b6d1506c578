"""From chat template to token ids without ever re-tokenising what was sampled, and from a reply's text to actions.

    chat = Chat(tokenizer)
    ids = chat.prompt(instruction, observation)            # ... up to and including "<think>"
    ids += sampled                                         # exactly what the model emitted, its end of turn included
    ids += chat.follow(sampled, next_observation)          # the template's glue around the next observation

A chat template renders whole conversations. Rendering again each turn would tokenise old replies anew (other ids than
were sampled), and many templates rewrite history (they delete earlier reasoning). So the template is rendered once, on
marker words, and what stands between the markers is the glue. Any template with user and assistant roles works; where
there is no system role, the instruction goes in front of the first observation.

Instructions and observations are tokenised together with the glue, so the text of a special token inside an observation
becomes that token: they come from the environment and are trusted. Left out on purpose: tools, images, model names.
"""

import re
from dataclasses import dataclass, field

from jinja2 import TemplateError

SYSTEM, USERS, REPLIES = "marker-s", ("marker-u1", "marker-u2", "marker-u3"), ("marker-r1", "marker-r2")
# A generation prompt may open a think block already, or hold an empty one (a template with thinking switched off).
OPEN_THINK = re.compile(r"<think>\s*(</think>\s*)?$")


class Chat:
    """The glue between turns, learnt from `tokenizer.chat_template`. ValueError when there is none or it drops text.

    end_ids: ids any of which ends a turn: the template's end-of-turn token, and the tokenizer's end of text.
    """

    def __init__(self, tokenizer):
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("model: its tokenizer has no chat template; valid: a chat (instruct) model, or set chat_template")
        self.tokenizer = tokenizer
        # Glue of a later turn, from a conversation without a system message: some templates move that to the last turn.
        u1, u2, u3 = ({"role": "user", "content": u} for u in USERS)
        r1, r2 = ({"role": "assistant", "content": r} for r in REPLIES)
        talk = self._render([u1, r1, u2, r2, u3])
        _, glue = _cut(talk, REPLIES[1])
        self._glue, self._tail = _cut(glue, USERS[2])  # end of turn + user header; end of user + assistant header
        self._tail = OPEN_THINK.sub("", self._tail) + "<think>"
        # A first turn may differ (begin of text, default system message), so head and tail are learnt from it too.
        self._head, self._middle, first_tail = self._first_turn(u1)
        self._first_tail = OPEN_THINK.sub("", first_tail) + "<think>"
        self._end_id = self._template_end()
        ends = [self._end_id, tokenizer.eos_token_id]
        self.end_ids = list(dict.fromkeys(i for i in ends if i is not None))
        if not self.end_ids:
            raise ValueError("model: neither its chat template nor its tokenizer has an end-of-turn token; set eos_token")

    def prompt(self, instruction: str, observation: str) -> list[int]:
        """Ids of the first turn's context: system, first observation, up to and including "<think>"."""
        return self._encode(self._head + instruction + self._middle + observation + self._first_tail)

    def follow(self, reply_ids: list[int], observation: str) -> list[int]:
        """Ids that come after a sampled reply, up to and including the next "<think>".

        A reply that was cut (its last id ends no turn) gets the template's end of turn; one that ended itself does not.
        """
        ids = self._encode(self._glue + observation + self._tail)
        if reply_ids and reply_ids[-1] in self.end_ids and self._end_id is not None:
            ids = ids[ids.index(self._end_id) + 1 :]  # the first one is the template's: it stands before the observation
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def reply_text(self, reply_ids: list[int]) -> str:
        """The text of a sampled reply, without the end of turn: what `parse_reply` takes."""
        ended = bool(reply_ids) and reply_ids[-1] in self.end_ids
        return self.decode(reply_ids[:-1] if ended else reply_ids)

    def _encode(self, text: str) -> list[int]:
        # the template writes its own begin of text, as in apply_chat_template(tokenize=True)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _render(self, messages) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _first_turn(self, user) -> tuple[str, str, str]:
        """Text before the instruction, between it and the observation, and after."""
        try:
            text = self._render([{"role": "system", "content": SYSTEM}, user])
        except TemplateError:  # how templates say that they have no system role
            text = ""
        if SYSTEM in text:
            head, rest = _cut(text, SYSTEM)
            return head, *_cut(rest, user["content"])
        head, tail = _cut(self._render([user]), user["content"])
        return head, "\n\n", tail

    def _template_end(self) -> int | None:
        """The special token that the template puts after a reply, None when it puts plain text there."""
        ids = self._encode(self._glue.lstrip())
        special = {i for i, t in self.tokenizer.added_tokens_decoder.items() if t.special}
        return ids[0] if ids and ids[0] in special | set(self.tokenizer.all_special_ids) else None


def _cut(text: str, marker: str) -> tuple[str, str]:
    """Text before and after a marker. ValueError when the template did not render the message."""
    before, found, after = text.partition(marker)
    if not found:
        raise ValueError("model: its chat template drops messages; valid: one that renders user and assistant turns")
    return before, after


@dataclass
class Reply:
    """A reply taken apart. Not parsed: no actions, and `reasoning` is what stands before the first "</think>"."""

    reasoning: str
    actions: list[str] = field(default_factory=list)
    parsed: bool = False


REPLY = re.compile(r"(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)


def parse_reply(text: str) -> Reply:
    """Take apart what followed the prompt's "<think>": "reasoning</think><answer>a || b</answer>".

    Parsed only if every tag stands there exactly once, in this order, with nothing but white space between and after,
    and there is an action. Only the reply is looked at, so tags in the prompt do not count. Never raises.
    """
    once = all(text.count(tag) == 1 for tag in ("</think>", "<answer>", "</answer>")) and "<think>" not in text
    match = REPLY.fullmatch(text) if once else None
    actions = [a.strip() for a in match[2].split("||") if a.strip()] if match else []
    return Reply(text.partition("</think>")[0].strip(), actions, bool(actions))


def reasoning_span(reply_ids: list[int], tokenizer) -> int:
    """How many leading ids of a reply are reasoning, wholly before "</think>"; -1 if it is never closed.

    The tag may be several tokens, and its "<" may share one with the text before it; that token is not reasoning.
    """
    tag = "</think>"

    def has_tag(ids):
        return tag in tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    if not has_tag(reply_ids):
        return -1
    low, high = 1, len(reply_ids)  # the shortest prefix that holds the tag, by bisection
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if has_tag(reply_ids[:middle]) else (middle + 1, high)
    start = low - 1
    while not has_tag(reply_ids[start:low]):
        start -= 1
    return start
