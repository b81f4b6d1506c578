"""Everything in a run that is not learning: the progress bar, its files, checkpoints, evaluations, why it ends, what it says.

    with session(c, out, saved) as s:                   # signals are answered at the end of a step; errors become one line
        s.begin(c, page, monitor, evaluate, ...)        # after a resume, all is put back as it was
        for step in s.steps():
            with s.timed("rollout"): ...                # s.line collects the metrics of the step
            s.end_step(episodes, advantages, kept)      # evaluation, log, early stop, checkpoint
        return s.finish()
"""

import shlex
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from nanoragen.run import checkpoint, console, distributed, errors, faults, metrics, stops
from nanoragen.run.log import Lines, Log
from nanoragen.run.provenance import RunRecord
from nanoragen.run.records import rewind
from nanoragen.run.settings import env_flags
from nanoragen.run.signals import Stop


@contextmanager
def session(c, out: Path, saved: Path | None = None):
    """The Session of a run. Ctrl-C, SIGTERM and SIGHUP are answered at the end of a step: it is saved, and the run can be resumed.

    An error that has a cure comes out as CannotGoOn, in one line.
    """
    # no bar where nobody watches: there a line a step is all
    look = {"unit": "step", "dynamic_ncols": True, "smoothing": 0.1, "disable": distributed.rank() > 0 or not sys.stderr.isatty()}
    # whatever ends the run, the bar's line ends too, and what is printed next starts a new one
    with Stop() as stop, tqdm(total=c.steps, **look) as bar:
        run = Session(c, out, saved, stop, bar)
        try:
            yield run
        except Exception as e:
            why = errors.reason(e, run.doing, c)
            if why is None:
                raise
            raise errors.CannotGoOn(f"{why}; {errors.how_to_go_on(out)}") from e
        except SystemExit:
            if stop.left:
                run.say(f"ended at once by {stop.left} in {run.doing or 'the start'}; {errors.how_to_go_on(out)}")
            raise


class Session:
    """See above. saved: the checkpoint that the run goes on from, or None. line: the metrics of the step so far."""

    def __init__(self, c, out: Path, saved: Path | None, stop, bar):
        self.c, self.out, self.saved, self.stop, self.bar = c, Path(out), saved, stop, bar
        self.line, self.history, self.done, self.doing = {}, [], 0, ""
        self.before = self.after = self.early = self.asked = None

    def phase(self, text: str):
        self.doing = text
        self.bar.set_description_str(text)

    def say(self, text: str):
        if distributed.rank() == 0:
            self.bar.write(text)

    @contextmanager
    def timed(self, name: str):
        """A phase whose seconds are logged as time/<name>."""
        self.phase(name)
        begun = time.perf_counter()
        yield
        self.line[f"time/{name}"] = time.perf_counter() - begun

    def begin(self, c, page, monitor, evaluate, model, lines, optimizer, scheduler, critic):
        """Open the files, put back what was saved, say what is about to happen, and evaluate.

        page: refresh() and write() of the report. monitor: of collapse, with state_dict() and regime. evaluate(n) -> (figures,
        episodes) on n held-out seeds. model: (model, tokenizer, save_model), as `checkpoint.save` takes them. lines: what to say first.
        """
        self.c, self.page, self.monitor, self.evaluate, self.model = c, page, monitor, evaluate, model
        self.parts = {"optimizer": optimizer, "scheduler": scheduler, "critic": critic}
        if self.saved:
            state = checkpoint.restore(self.saved, **self.parts)
            self.before, self.done = state["before"], state["step"]
            monitor.load_state_dict(state)
            self.history = distributed.on_first(lambda: rewind(self.out, self.done))
        if distributed.rank() == 0:
            self.log = Log(self.out, asdict(replace(c, resume="")), trackers=c.log)
            self.cross = Lines(self.out / "cross.jsonl")
            self.record = RunRecord(self.out, resumed=self.saved is not None)
        else:
            self.log = self.cross = self.page = self.record = distributed.Silent()
        self.bar.initial = self.bar.n = self.done
        for text in filter(None, lines):
            self.say(text)
        episodes = c.groups * c.group_size
        self.few, self.many = c.eval_episodes or episodes, c.final_episodes or 2 * episodes
        if self.saved:
            gone = "" if self.history else "; the log is gone, so early stops count anew"
            self.say(f"resumed after step {self.done} from {self.saved}{gone}")
        else:
            self.before = self._evaluated("before", self.many)
            self.say(f"before training: {c.env} success {console.interval(self.before)} on {self.many} held-out episodes")

    def steps(self):
        """The number of each step, until the last one or a reason to stop."""
        for step in range(self.done + 1, self.c.steps + 1):
            self.line = {"step": step, **(metrics.scores(f"eval/before/{self.c.env}", self.before) if step == 1 else {})}
            self.start = time.perf_counter()
            yield step
            if self.last or (self.due and self.asked):
                return

    def without_faults(self, episodes) -> list[int]:
        """Which episodes no environment failed in; the others are logged. TooManyFaults: what was learned so far is saved first."""
        step = self.line["step"]
        self.log.errors(step, episodes)
        played, failed = faults.split(episodes)
        if len(failed) > self.c.max_faults * len(episodes):
            if step > 1 and (self.saved is None or self.saved.name != checkpoint.folder_name(step - 1)):
                self._save(step - 1)
            raise faults.TooManyFaults(failed, len(episodes), self.c.max_faults)
        self.line["rollout/faults"] = len(failed)
        return played

    def end_step(self, episodes, advantages, kept):
        """Evaluate where it is due, log, and save. advantages, kept: one each an episode, for the log."""
        c, line, step = self.c, self.line, self.line["step"]
        line["step_time"] = time.perf_counter() - self.start
        line["tokens_per_second"] = line["num_tokens"] / line["step_time"]
        line.update(metrics.process_metrics())
        if step == c.steps:
            self._final_evaluation()
        elif c.eval_every and step % c.eval_every == 0:
            line.update(metrics.scores(f"eval/{c.env}", self._evaluated("held out", self.few)))
        self.history.append(line)
        self.early = stops.early_stop(self.history, c.env, c.early_stop)
        if self.early:
            line[f"early_stopped/{self.early[0]}"] = 1.0
            if step < c.steps:
                self._final_evaluation()
        self.asked = distributed.first(self.stop.asked)  # whichever process was asked, all stop
        self.last = step == c.steps or self.early or self.asked
        self.log.step(line)
        self.log.rollouts(step, episodes, advantages, kept)
        self.say(console.console_line(line))
        self.due = self.last or (c.save_every and step % c.save_every == 0)
        if self.due:
            self.saved = self._save(step)
            self.record.write()
            self.asked = distributed.first(self.stop.asked)  # perhaps while it was saved
        self.page.refresh()  # written when that is cheap: under 1% of the time
        self.bar.update()

    def finish(self) -> dict:
        """The closing words. Returns the last line of the log; a run that was asked to stop leaves with SystemExit(130)."""
        c, step = self.c, self.line["step"]
        if self.early and step < c.steps:
            self.say(f"stopped early: {self.early[1]} (--early_stop)")
        self.bar.close()
        self.log.close()
        self.page.write()
        if self.asked and step < c.steps:
            print(f"stopped by {self.asked} after step {step}, which is saved; go on with: {errors.resume_command(self.out)}")
            distributed.finish()
            raise SystemExit(130)
        before, after = map(console.interval, (self.before, self.after))
        print(f"\n{c.env} success on {self.many} held-out episodes: {before} before, {after} after {step} steps")
        said = console.diagnosis(self.history, self.before, self.after, c.env)
        print("\n".join(said + ([f"reasoning: {self.monitor.regime}"] if self.monitor.regime else [])))
        files = {"report": "report.html", "log": "metrics.jsonl", "episodes": "rollouts.jsonl"}
        print("\n".join(f"{name:9} {self.out / file}" for name, file in files.items()))
        print(f"model     {self.saved}\nevaluate  python eval.py --model {shlex.quote(str(self.saved))} {env_flags(c)}")
        return self.line

    def _evaluated(self, label: str, n: int) -> dict:
        self.phase(f"evaluation ({label})")
        found, episodes = self.evaluate(n)
        failed = faults.split(episodes)[1]
        if len(failed) > self.c.max_faults * n:
            self.log.errors(self.line.get("step", self.done), failed)
            raise faults.TooManyFaults(failed, n, self.c.max_faults)
        return found

    def _final_evaluation(self):
        self.after = self._evaluated("after", self.many)
        self.line.update(metrics.scores(f"eval/{self.c.env}", self.after))

    def _save(self, step: int) -> Path:
        self.phase("save")
        state = {"step": step, "before": self.before, **self.monitor.state_dict()}
        return distributed.on_first(
            lambda: checkpoint.save(self.out, step, *self.model, **self.parts, state=state, keep=self.c.keep)
        )
