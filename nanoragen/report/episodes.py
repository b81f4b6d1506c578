"""The episodes of a page: which ones it has, and each as HTML in which what was read, reasoned and answered is told apart.

Everything is in the page when it is opened; report.js only chooses which episode is seen. Kept groups come first, four
episodes of each, so that episodes of one prompt can be compared.
"""

import html

from nanoragen.report.runs import number, spread, visible

MAX_STEPS = 12  # of which episodes are shown, all runs of a page together
MAX_EPISODES = 16  # shown of a step
MAX_READ = 512  # lines of a step that are looked at for them
MAX_TEXT = 20_000  # characters of an episode
MAX_BYTES = 1_600_000  # of all episodes of a page, about


def escape(text) -> str:
    return html.escape(visible(text))


def as_list(x) -> list:
    return x if isinstance(x, list) else []


def clip(text, n) -> str:
    return text if len(text) <= n else f"{text[:n]} \u2026 ({len(text) - n} more characters)"


def chosen(run, n_runs=1) -> list[dict]:
    """The episodes of a run for a page of n_runs: in the order of steps and groups."""
    out, steps = [], spread(run.has("rollouts.jsonl"), max(2, MAX_STEPS // n_runs))
    for step in steps:
        seen, found, left = {}, [], MAX_BYTES // n_runs // len(steps)
        for n, record in enumerate(run.records("rollouts.jsonl", step)):
            group = str(record.get("group"))[:60]
            seen[group] = seen.get(group, -1) + 1
            found.append((record.get("kept") is False, seen[group] // 4, list(seen).index(group), seen[group], record))
            found = sorted(found, key=lambda x: x[:4])[:MAX_EPISODES]  # of long episodes only as many are held
            if n + 1 == MAX_READ:
                break
        shown = []
        for *_, place, n, record in found:
            e = episode(step, record, run)
            e["html"] = html_of(e)
            left -= len(e["html"].encode(errors="replace"))
            if left < 0 and shown:
                break
            shown.append((place, n, e))
        out += [e for *_, e in sorted(shown, key=lambda x: x[:2])]
    return out


def episode(step, record, run) -> dict:
    """A line of rollouts.jsonl, checked. parts: what was read (prompt) and sampled (reasoning, answer), turn by turn."""
    keys = ("env", "seed", "group", "success", "reward", "advantage", "kept", "terminated", "truncated")
    turns = [t for t in as_list(record.get("turns")) if isinstance(t, dict)][:100]
    found = {k: v if isinstance(v, bool) else n if (n := number(v)) is not None else visible(v)[:60] for k in keys
             if (v := record.get(k)) is not None}  # fmt: skip
    shown = [
        {
            "reward": number(t.get("reward")), "advantage": number(t.get("advantage")), "parsed": t.get("parsed") is not False,
            "actions": [clip(visible(a), 200) for a in as_list(t.get("actions"))[:20]],
        }
        for t in turns
    ]  # fmt: skip
    return {"step": step, **found, "turns": shown, **(by_token(record, turns, run) or by_message(record, turns))}


def by_message(record, turns) -> dict:
    """The parts of an episode from its messages; the reply is cut where its reasoning ends."""
    parts, n = [], 0
    for message in as_list(record.get("messages")):
        role, text = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, message)
        if role != "assistant" or n >= len(turns):
            parts.append([n, "prompt", f"{role}: {text}"])
            continue
        reply = str(turns[n].get("reply", text))
        reasoning, tag, answer = reply.partition("</think>")
        parts += [[n, "prompt", "<think>"], [n, "reasoning", reasoning]] if tag else []
        parts.append([n, "answer", tag + answer if tag else reply])
        n += 1
    left = MAX_TEXT
    for part in parts:
        part[2] = clip(visible(part[2]), left)
        left = max(0, left - len(part[2]))
    return {"parts": [p for p in parts if p[2]]}


def by_token(record, turns, run) -> dict | None:
    """The same from the ids, token by token, where log-probs or entropies of the sampled ids were recorded.

    A part is [turn, kind, [text of each token], {"logprobs": [...], "entropies": [...]}], or as in by_message for a prompt.
    None without such values or without a tokenizer (the newest step_*/tokenizer.json of the run).
    """
    ids, mask = as_list(record.get("ids")), as_list(record.get("mask"))
    sampled = [i for i, m in enumerate(mask[: len(ids)]) if m]
    values = {}
    for key in ("logprobs", "entropies"):
        found = as_list(record.get(key))
        if found and len(found) in (len(sampled), len(ids)):
            values[key] = dict(zip(sampled if len(found) == len(sampled) else range(len(ids)), map(number, found)))
    if not values or not all(type(i) is int and i >= 0 for i in ids) or not (tokenizer := run.tokenizer()):
        return None
    spans = [(number(t.get("start")) or 0, number(t.get("end")) or 0, number(t.get("think_end")) or 0) for t in turns]
    decode = lambda some: visible(tokenizer.decode(some, skip_special_tokens=False))
    parts, left, at, turn = [], MAX_TEXT, 0, 0
    while at < len(ids) and left > 0:
        while turn < len(spans) and at >= spans[turn][1]:
            turn += 1
        start, end, think_end = spans[turn] if turn < len(spans) else (len(ids),) * 3
        stop = int(min(len(ids), next((edge for edge in (start, think_end, end) if edge > at), len(ids))))
        if at < start:
            parts.append([turn, "prompt", clip(decode(ids[at:stop]), left)])
        else:
            tokens = pieces(ids[at:stop], decode)
            kind = "reasoning" if at < think_end else "answer"
            parts.append([turn, kind, tokens, {k: [v.get(i) for i in range(at, stop)] for k, v in values.items()}])
        left -= sum(map(len, parts[-1][2])) + 8 * (stop - at)
        at = stop
    return {"parts": parts, "values": list(values)}


def pieces(ids, decode) -> list[str]:
    """The text of each id. Where several ids make one character, the last of them has it and the others are empty."""
    out, open_ids = [], []
    for n, i in enumerate(ids):
        open_ids.append(i)
        text = decode(open_ids)
        done = not text.endswith("\ufffd") or n == len(ids) - 1 or len(open_ids) == 4  # a character is at most 4 bytes
        out.append(text if done else "")
        open_ids = [] if done else open_ids
    return out


# -- as HTML -------------------------------------------------------------------------------------------------------------


def html_of(e) -> str:
    """The inside of an episode's <article>."""
    end = f"cut off by {e['truncated']}" if e.get("truncated") else "ended by the environment" if e.get("terminated") else ""
    kept = "group dropped by the filter: it trains nothing" if e.get("kept") is False else "group kept"
    facts = [f"step {e['step']}", "\u2713 success" if e.get("success") is True else "\u2715 no success", f"reward {shown(e, 'reward')}",
             f"advantage {shown(e, 'advantage')}", kept, f"group {shown(e, 'group')}, seed {shown(e, 'seed')}", end]  # fmt: skip
    out = [f"<ul class=facts>{''.join(f'<li>{escape(f)}' for f in facts if f)}</ul>"]
    for n in range(max([len(e["turns"]), *(p[0] + 1 for p in e["parts"])])):
        head = "After the last reply"
        if n < len(e["turns"]):
            t = e["turns"][n]
            head = f"Turn {n + 1}: {', '.join(t['actions']) or 'no action'}{'' if t['parsed'] else ', does not parse'}; reward {shown(t, 'reward')}"
            head += "" if t["advantage"] is None else f", advantage {shown(t, 'advantage')}"
        text = "".join(span(p, e) for p in e["parts"] if p[0] == n)
        out.append(f"<h4>{escape(head)}</h4><p class=text dir=auto>{text}</p>")
    return "".join(out)


def shown(of, key) -> str:
    value = of.get(key)
    return "\u2013" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def span(part, e) -> str:
    """A part of a turn. --l and --e: how strongly a token is coloured, 1 at a log-prob of -5 and at an entropy of 2.5 nats."""
    _, kind, words, *values = part
    if values:
        scale = {"logprobs": ("log-prob", "l", -5.0), "entropies": ("entropy", "e", 2.5)}
        cells = []
        for i, word in enumerate(words):
            known = [(*scale[k], x) for k, xs in values[0].items() if (x := xs[i]) is not None]
            title = ", ".join(f"{name} {x:.3g}" for name, _, _, x in known)
            style = ";".join(f"--{short}:{min(1.0, max(0.0, x / full)):.2g}" for _, short, full, x in known)
            cells.append(f'<i title="{title}" style="{style}">{escape(word)}</i>')
        words = "".join(cells)
    else:
        words = escape(words) + "\n" * (words != "<think>")  # a message of its own
    return f"<span class={kind}>{words}</span>"
