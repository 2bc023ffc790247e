"""Generation in the engine's thread.

Each step decodes one batch and delivers its events in one call. The scheduler owns its context;
other threads may only set `Task.cancelled`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ..base import Event, Finish, Load, Piece, PromptTokens, Reason, Token
from ..errors import EngineError, InvalidGrammar, LatimerError
from ..stops import TokenCut
from .cache import Cache, Slot
from .chain import ChainSampler, LongSampler, is_needed
from .draft_model import DraftModel, Wanted
from .drafts import LIKELY, OUTCOMES, Acceptance, DecodeCost, Lookup
from .grammars import Candidates, Constraint, LimitExceeded
from .library import Context, DecodeFailed
from .line import ChoiceQueue
from .padding import Padding
from .projector import Projector
from .sampling import DeadEnd, RowSampler, Sampler, score
from .spinning import Spinning
from .states import BLOCK
from .tasks import Run, Task, TaskChoice
from .threads import Threads
from .tiles import MOST_APART, TILE
from .trace import Trace
from .vocabulary import Vocabulary

Delivery = tuple[Task, "Sequence[Event] | LatimerError"]

NOT_FINITE = "The model computed logits that are not finite. Use another file of the model."

# What is assumed of decodes where measured times must decide nothing.
UNMEASURED = DecodeCost()


def _is_seeded(choice: TaskChoice) -> bool:
    job = choice.task.job
    return job.sampling.temperature > 0 and job.seeds[choice.index] is not None


def _is_reproducible(choice: TaskChoice) -> bool:
    """Return True if a request that runs alone should have the same numbers again.

    Flash attention divides the keys of a single token among the threads, so their number changes
    the last digits. It changes nothing in a batch of several tokens.
    """
    job = choice.task.job
    return job.sampling.temperature == 0 or job.logprobs is not None or _is_seeded(choice)


class Scheduler:
    """A scheduler of tasks over the sequences of one context.

    Args:
        limit: the number of sequences that run in parallel; other choices wait, and requests take
            turns.
        post: receives everything that a step delivers, in one call.
        apart: the cells of generated tokens from which they get batches without prompts.
        drafts: True to draft tokens by prompt lookup, for memory that can remove them again.
        draft_model: what drafts other tokens, for the same memory.

    Attributes:
        seconds: the time of the last step.
    """

    def __init__(
        self,
        context: Context,
        vocabulary: Vocabulary,
        cache: Cache,
        candidates: Candidates,
        limit: int,
        post: Callable[[list[Delivery]], None],
        projector: Projector | None = None,
        trace: Trace | None = None,
        drafts: bool = False,
        draft_model: DraftModel | None = None,
        apart: float = math.inf,
    ) -> None:
        self._context = context
        self._vocabulary = vocabulary
        self._cache = cache
        self._candidates = candidates
        self._scratch = np.empty(vocabulary.size, np.float32)
        self._limit = limit
        self._post = post
        self._projector = projector
        self._drafts = drafts
        self._draft_model = draft_model
        self._is_drafting = drafts or draft_model is not None
        self._cost = DecodeCost()
        self._padding = Padding()
        self._apart = apart
        # True if the latest batch has only prompts, although generated tokens are there.
        self._were_prompts = False
        # True if sequences are left of a round of batches with a part of all each.
        self._in_round = False
        self._threads = Threads(context.threads)
        self._spinning = Spinning(context.threads)
        self._trace = trace
        self._waiting = ChoiceQueue()
        self._running: list[Run] = []
        # True if the next choice did not fit: nothing is admitted until a sequence ends.
        self._full = False
        self._outbox: list[Delivery] = []
        self.seconds = 0.0
        self._preemptions = 0

    def load(self) -> Load:
        """Return what runs and what waits; see `Backend.load`."""
        waiting = len(self._waiting.requests)
        return Load(len(self._running), waiting, self._cache.used, self._preemptions)

    @property
    def is_busy(self) -> bool:
        """True if choices run or wait."""
        return bool(self._running or self._waiting)

    def submit(self, task: Task) -> None:
        """Queue a task."""
        # The first choice evaluates the prompt for all; the others are added afterwards.
        self._waiting.add(TaskChoice(task, 0))

    def abandon(self, error: EngineError) -> None:
        """End all running and waiting tasks with an error."""
        tasks = {c.task: None for c in [*self._waiting, *(s.choice for s in self._running)]}
        for run in [*self._waiting.preempted, *self._running]:
            run.sampler.close()
        self._cache.drop_running()
        self._waiting.clear()
        self._running.clear()
        self._context.clear()
        self._spinning.end()
        self._full = False
        # Before them are the ends of others in the step that failed.
        self._outbox += [(task, error) for task in tasks]
        self._flush()

    def step(self) -> None:
        """Admit choices, decode once, sample a token for each ready sequence, deliver events."""
        trace = self._trace
        if trace is not None:
            trace.mark("between steps")
        self._end_running()
        if self._waiting:
            self._end_waiting()
            self._admit()
        if self._projector is not None:
            self._see()
        runs = self._in_turn()
        if self._is_drafting and not self._were_prompts:
            self._draft(runs)
        batch = self._fill(runs)
        if trace is not None:
            running, waiting = len(self._running), len(self._waiting)
            trace.mark("admit and fill", running=running, waiting=waiting)
        if batch:
            try:
                self._decode(batch)
            except DecodeFailed as error:
                self._fail(batch, error)
            else:
                if self._is_drafting:
                    # Drafts first: the windows of new choices could overwrite what a sequence needs
                    # again when its draft is removed.
                    batch.sort(key=lambda run: not run.draft)
                for run in batch:
                    if run.marks and run.marks[0] == len(run.slot.tokens):
                        self._cache.add_checkpoint(run.slot)
                    if run.scored is not None and run.outputs:
                        self._score(run)
                    if run.ready:
                        for one in (run,) if run.sampled else self._forked(run):
                            self._sample_all(one)
                if trace is not None:
                    trace.mark("sample")
        self._flush()
        self._cache.tidy()
        if trace is not None:
            trace.mark("hand over")
            trace.write()

    def _decode(self, batch: Sequence[Run]) -> None:
        """Evaluate the batch, with one token more or with fewer threads if that is faster."""
        threads, context = self._threads, self._context
        # Only batches of generated tokens take a time that is worth comparing.
        is_generated = all(run.sampled for run in batch)
        # The last digits of a lone greedy sequence depend on the number of threads.
        is_fixed = context.size == 1 and _is_reproducible(batch[0].choice)
        self._use_threads(is_fixed, is_generated)
        may_pad = is_generated and not threads.is_trying and self._may_pad(batch)
        is_padded = may_pad and self._padding.wants(context.size)
        if is_padded:
            context.pad()
        begun, on_cores = time.perf_counter(), time.process_time()
        size = context.decode()
        ended = time.perf_counter()
        seconds = ended - begun
        if threads.most > 1:
            on_cores = time.process_time() - on_cores
            if is_generated and not is_fixed:
                threads.add(size, seconds, on_cores, ended)
            elif context.threads == threads.used and not self._spinning.is_short:
                threads.measure(seconds, on_cores, ended)
            if is_fixed:
                self._spinning.add(seconds, on_cores, ended)
        if may_pad:
            self._padding.add(size, is_padded, seconds)
        if self._is_drafting and is_generated and not threads.is_trying:
            self._cost.add(size, seconds)
        if self._trace is not None:
            counts = {"sequences": len(batch), "tokens": size, "padded": int(is_padded)}
            self._trace.mark("decode", **counts, threads=context.threads)

    def _use_threads(self, is_fixed: bool, is_generated: bool) -> None:
        """Choose how many threads evaluate the next batch, and how long they spin.

        Args:
            is_fixed: True if all have to.
            is_generated: True if their time can be compared with that of others.
        """
        threads, context = self._threads, self._context
        if self._spinning.is_short:
            self._spinning.doubt(time.perf_counter())
        if is_fixed:
            count = threads.most
        elif is_generated:
            count = threads.next
        else:
            count = threads.known(time.perf_counter())
        if count != context.threads:
            context.use_threads(count)

    def _may_pad(self, batch: Sequence[Run]) -> bool:
        """Return True if a batch of generated tokens may get another token."""
        context = self._context
        size = context.size
        if size == 1 or size != context.outputs:
            return False
        if not (context.pads and context.room and context.output_room and self._cache.free):
            return False
        # A seed must reproduce its result, so its batches must not depend on measured times.
        return not any(map(_is_seeded, [run.choice for run in batch]))

    def _end_running(self) -> None:
        """Drop the sequences of cancelled tasks, and end those that their readers have cut."""
        for run in self._running[:]:
            choice = run.choice
            if choice.task.cancelled:
                self._release(run)
            elif choice.index in choice.task.job.stops.ends:
                self._finish(run, "stop", None, run.sampled)

    def _end_waiting(self) -> None:
        """Drop the waiting choices of cancelled tasks, and end those that were cut."""
        for run in self._waiting.preempted:
            if run.choice.task.cancelled:
                run.sampler.close()
            elif run.choice.index in run.choice.task.job.stops.ends:
                self._finish(run, "stop", None, run.sampled)
        if any(choice.task.cancelled for choice in self._waiting):
            self._waiting.keep(lambda choice: not choice.task.cancelled)
            self._full = False

    def _admit(self) -> None:
        """Start or resume waiting choices while sequences and cells are available."""
        if self._full:
            return
        for choice in self._waiting.in_turn():
            if len(self._running) >= self._limit:
                return
            preempted, task = choice.preempted, choice.task
            scoring = task.job.prompt.logprobs is not None and choice.index == 0
            history = [*task.prompt] if preempted is None else preempted.history
            wanted = len(history)
            if scoring and task.max_tokens == 0:
                # The last token's logits would only score a token that is not generated.
                wanted = len(history) - 1
            # A seed must reproduce its result, but reuse changes the last digits of logits.
            reuse = not scoring and (preempted is not None or not _is_seeded(choice))
            if reuse and self._is_coming(history, task.job.owner):
                continue
            # Each running sequence needs a cell for its next token.
            spare = len(self._running)
            slot = self._cache.take(history[:wanted], task.job.owner, reuse, spare)
            if slot is None:
                self._full = True
                return
            if preempted is None:
                if not choice.index:
                    task.ticket.note_wait(task.since)
                run = self._new_run(choice, slot, history, wanted)
            else:
                run, preempted.slot, choice.preempted = preempted, slot, None
            run.marks = self._cache.marks(slot, history[:wanted]) if reuse else None
            self._waiting.take(choice)
            self._running.append(run)
            if scoring and run.sampled == 0:
                self._begin_scoring(run)

    def _is_coming(self, history: list[int], owner: str) -> bool:
        """Return True if a running sequence is evaluating a prefix that this prompt can reuse.

        Clients that send the same instructions at the same time wait for the first of them.
        """
        for run in self._running:
            if run.left > 1 and run.choice.task.job.owner == owner:
                known, least = run.history[: run.wanted], len(run.slot.tokens) + BLOCK
                if self._cache.shared(known, history, run.marks or ()) >= least:
                    return True
                if run.marks is not None:
                    length = self._cache.branch(known, history)
                    # Each checkpoint ends a batch, so many prompts get none close to each other.
                    if any(abs(length - mark) < BLOCK for mark in run.marks):
                        length -= length % BLOCK
                    if length >= least:
                        run.marks = sorted({*run.marks, length})
                        return True
        return False

    @property
    def size(self) -> int:
        """The number of cells in the context."""
        return self._cache.size

    def _new_run(self, choice: TaskChoice, slot: Slot, history: list[int], wanted: int) -> Run:
        task = choice.task
        constraint = None if task.constraint is None else task.constraint.copy()
        sampler = self._sampler(task, task.job.seeds[choice.index], constraint)
        cached = max(slot.reused - task.bos_count, 0)
        cut = TokenCut(task.job.stops.for_engine)
        lookup = Lookup(task.prediction, len(history)) if self._drafts and not task.chunks else None
        guesses = None
        if self._draft_model is not None and not task.chunks:
            guesses = Acceptance(LIKELY, OUTCOMES)
        run = Run(
            choice, slot, sampler, cut, history, wanted, cached=cached, lookup=lookup,
            guesses=guesses,
        )  # fmt: skip
        task.runs.append(run)
        return run

    def _sampler(self, task: Task, seed: int | None, constraint: Constraint | None) -> Sampler:
        sampling = task.job.sampling
        if not is_needed(sampling):
            return RowSampler(sampling, seed, self._vocabulary, self._scratch, constraint)
        return (LongSampler if sampling.extras.get("min_tokens") else ChainSampler)(
            sampling,
            seed,
            self._vocabulary,
            self._candidates,
            [token for token in task.prompt if token >= 0] if task.chunks else task.prompt,
            task.max_tokens,
            self._cache.size,
            constraint,
        )

    def _begin_scoring(self, run: Run) -> None:
        task = run.choice.task
        spelling, control = self._vocabulary.token(task.prompt[task.bos_count])
        first = task.shown[0]
        spelling = spelling if control else first
        token = Token(task.prompt[task.bos_count], first, spelling, control, None)
        run.scored = [token]
        if not run.wanted or (task.max_tokens == 0 and task.prompt_tokens == 1):
            self._end_scoring(run)

    def _see(self) -> None:
        """Evaluate one media chunk that is next in a prompt; it is not part of the batch."""
        for run in self._running:
            chunk = run.choice.task.chunks.get(len(run.slot.tokens))
            if chunk is None or self._projector is None:
                continue
            if not self._make_room(run, len(chunk.ids), (), len(chunk.ids)):
                return
            position = len(run.slot.tokens) - run.slot.surplus
            self._context.use_threads(self._threads.known(time.perf_counter()))
            self._cache.extend_media(run.slot, chunk.ids, chunk.positions)
            try:
                self._projector.evaluate(self._context, chunk, run.slot.id, position)
            except DecodeFailed as error:
                self._fail([run], error)
            return

    def _in_turn(self) -> list[Run]:
        """Return the sequences of the next batch: single tokens first, then prompts.

        Where it is faster, a batch has one of the two, by turns; a new prompt is first. Single
        tokens that would fill a tile are then in several batches.
        """
        running = self._running
        in_round, self._in_round = self._in_round, False
        single = [run for run in running if run.wanted - len(run.slot.tokens) <= 1]
        if len(single) == len(running):
            self._were_prompts = False
            return single if len(single) < TILE else self._next_part(single, in_round)
        prompts = [run for run in running if run.left > 1]
        if not self._are_apart(single, prompts):
            self._were_prompts = False
            return single + prompts
        self._were_prompts = not (self._were_prompts or in_round)
        return prompts if self._were_prompts else self._next_part(single, in_round)

    def _are_apart(self, single: Sequence[Run], prompts: Sequence[Run]) -> bool:
        """Return True if single tokens and prompts are faster in batches of their own."""
        tokens = min(len(single) + sum(run.left for run in prompts), self._context.room)
        if not single or tokens < TILE:
            return False
        # Sequences share cells, and a prompt can reuse those of a sequence that is not running.
        own = sum(len(run.slot.tokens) - run.slot.reused for run in prompts)
        used = self._cache.size - self._cache.free - own
        return min(used, sum(len(run.slot.tokens) for run in single)) >= self._apart

    def _next_part(self, single: list[Run], in_round: bool) -> list[Run]:
        """Return the sequences of the next batch that is too small for tiles.

        They are a part of a round, in which each sequence that was there at its start has one
        token. A sequence that comes later waits for the next round. It could otherwise prolong the
        round, or have a batch of its own before each prompt, as others came and went.
        """
        if not self._are_apart(single, ()):
            return single
        due = [run for run in single if run.is_due] if in_round else []
        if not due:
            due = single
            for run in single:
                run.is_due = True
        parts = math.ceil(len(due) / MOST_APART)
        chosen = due[: math.ceil(len(due) / parts)]
        self._in_round = parts > 1
        for run in chosen:
            run.is_due = False
        return chosen

    def _fill(self, runs: Sequence[Run]) -> list[Run]:
        """Add the next tokens of some sequences to the batch, as far as there is room."""
        batch: list[Run] = []
        running, context, cache = self._running, self._context, self._cache
        for run in runs:
            room, output_room = context.room, context.output_room
            if not room or not output_room:
                break
            if run not in running:
                continue
            slot, scoring = run.slot, run.scored is not None
            left = self._text_left(run) if run.choice.task.chunks else run.left
            if not left:
                continue
            count = min(left, room, output_room) if scoring else min(left, room)
            if run.marks:
                count = min(count, self._before_mark(run))
            if cache.free < count:
                count = self._make_room(run, count, batch)
                if not count:
                    continue
            position = len(slot.tokens)
            tokens = run.history[position : position + count]
            run.ready = position + count == run.wanted
            run.outputs = count if scoring else int(run.ready)
            if run.proposal:
                run.draft = run.proposal[: self._draft_room(count)] if run.ready else []
                run.proposal = []
                run.drafted += len(run.draft)
                tokens += run.draft
                run.outputs += len(run.draft)
            cache.extend(slot, tokens)
            run.row = context.add(slot.id, position - slot.surplus, tokens, run.outputs)
            batch.append(run)
        return batch

    def _before_mark(self, run: Run) -> int:
        """Return how many tokens of a prompt are evaluated before its next checkpoint."""
        position = len(run.slot.tokens)
        # A mark among embeddings is passed.
        run.marks = [mark for mark in run.marks or () if mark > position]
        return min(run.marks, default=run.wanted) - position

    def _draft(self, runs: Sequence[Run]) -> None:
        """Propose the next tokens of sequences: what followed before, or what a model drafts."""
        batch, others = len(runs), []
        ready = [run for run in runs if run.sampled and run.left == 1]
        for run in ready:
            most = min(self._draft_room(0), run.choice.task.max_tokens - run.sampled - 1)
            if most <= 0:
                continue
            if run.lookup is not None:
                cost = self._cost_for(run)
                run.proposal = run.lookup.propose(run.history, cost, batch, most)
                run.source = run.lookup.acceptance
            if not run.proposal and run.guesses is not None:
                others.append((run, most))
        if others and self._draft_model is not None:
            self._let_draft(self._draft_model, others, batch)

    def _let_draft(self, model: DraftModel, runs: Sequence[tuple[Run, int]], batch: int) -> None:
        """Propose what a model drafts for sequences, each with the largest number of tokens.

        Args:
            batch: the number of sequences in the batch.
        """
        wanted = []
        for run, most in runs:
            assert run.guesses is not None
            cost = self._cost_for(run)
            count = min(run.guesses.worth(cost, batch, model.seconds), most)
            if not count:
                run.guesses.doubt()
            else:
                wanted.append(Wanted(run.slot.id, run.history, count))
        if not wanted:
            model.doubt()
            return
        threads = self._threads
        # A draft decodes single tokens.
        is_fixed = any(_is_seeded(run.choice) for run, _ in runs)
        drafts = model.propose(wanted, threads.most if is_fixed else threads.used)
        for run, _ in runs:
            run.proposal, run.source = drafts.get(run.slot.id, []), run.guesses

    def _cost_for(self, run: Run) -> DecodeCost:
        """Return what decides on the drafts of a sequence."""
        # A seed must reproduce its result, so its batches must not depend on measured times.
        return UNMEASURED if _is_seeded(run.choice) else self._cost

    def _draft_room(self, count: int) -> int:
        """Return how many tokens of a draft fit, after some tokens and besides other sequences."""
        room = min(self._context.room, self._context.output_room, self._cache.free)
        return max(room - count - len(self._running), 0)

    def _text_left(self, run: Run) -> int:
        """Return how many tokens are left to evaluate before the next media chunk."""
        chunks, position = run.choice.task.chunks, len(run.slot.tokens)
        ends = [start for start in chunks if start >= position]
        return min([*ends, run.wanted]) - position

    def _make_room(self, run: Run, count: int, batch: Sequence[Run], least: int = 1) -> int:
        """Return how many of a sequence's tokens get cells; 0 if it was preempted.

        Idle sequences are swapped out first. Then the sequences that began last are preempted,
        until at least `least` cells are free.
        """
        while not self._cache.make_room(count):
            if self._cache.free >= least:
                return self._cache.free
            others = [one for one in self._running if one not in batch]
            self._preempt(others[-1])
            if others[-1] is run:
                return 0
        return count

    def _preempt(self, run: Run) -> None:
        """Swap out a sequence, and queue its choice before all others."""
        self._preemptions += 1
        self._running.remove(run)
        run.proposal = []
        self._cache.swap_out(run.slot)
        run.scored = None
        run.choice.preempted = run
        self._waiting.put_first(run.choice)

    def _score(self, run: Run) -> None:
        """Score the prompt tokens that follow the tokens of the batch."""
        task, scored = run.choice.task, run.scored
        assert scored is not None
        position = len(run.slot.tokens)
        start = position - run.outputs
        # Logits before the first of the client's own tokens score nothing that is returned.
        skipped = max(task.bos_count - start, 0)
        followers = range(start + skipped + 1, min(position + 1, len(task.prompt)))
        if followers:
            tokens = []
            for at in followers:
                spelling, control = self._vocabulary.token(task.prompt[at])
                data = task.shown[at - task.bos_count]
                tokens.append((task.prompt[at], data, spelling if control else data, control))
            logits = self._context.logits(run.row + skipped, len(tokens))
            top = task.job.prompt.logprobs or 0
            scored += score(logits, tokens, top, self._vocabulary, self._scratch)
        if not run.left:
            self._end_scoring(run)

    def _end_scoring(self, run: Run) -> None:
        """Deliver the prompt's tokens, and finish the job if it generates none."""
        task, scored = run.choice.task, run.scored
        assert scored is not None
        run.scored = None
        self._deliver(task, PromptTokens(0, scored))
        if task.max_tokens:
            return
        run.ready = False
        others = range(1, len(task.job.seeds))
        finishes = [Finish(index, "length", None, task.prompt_tokens, 0) for index in others]
        self._deliver(task, *finishes)
        self._finish(run, "length", None, 0)

    def _forked(self, run: Run) -> list[Run]:
        """Return a ready sequence; with a prompt's first choice, also those of its other choices.

        All of them sample from the same logits. Choices for which no sequence is available wait
        for their turn.
        """
        choice, task = run.choice, run.choice.task
        if run.sampled or choice.index or len(task.job.seeds) == 1:
            return [run]
        found = [run]
        others = deque(TaskChoice(task, index) for index in range(1, len(task.job.seeds)))
        while others and len(self._running) < self._limit:
            slot = self._cache.fork(run.slot)
            if slot is None:
                break
            fork = self._new_run(others.popleft(), slot, [*task.prompt], len(task.prompt))
            fork.row, fork.outputs = run.row, run.outputs
            self._running.append(fork)
            found.append(fork)
        for other in others:
            self._waiting.add(other)
        return found

    def _sample_all(self, run: Run) -> None:
        """Sample the next token of a ready sequence, and those after the tokens of its draft."""
        drafted, before = len(run.draft), run.accepted
        row = run.row + run.outputs - 1 - drafted
        while self._sample(run, row):
            row += 1
        if drafted and run.source is not None:
            run.source.learn(drafted, run.accepted - before)
            self._end_draft(run)

    def _end_draft(self, run: Run) -> None:
        """Remove the tokens of a draft that were not sampled."""
        if run.draft:
            self._cache.cut(run.slot, len(run.slot.tokens) - len(run.draft))
            run.draft = []

    def _sample(self, run: Run, row: int) -> bool:
        """Sample a token; return True if it is the draft's, so that the next row follows it.

        Args:
            row: the row of logits.
        """
        task = run.choice.task
        job = task.job
        logits = self._context.logits(row, 1)[0]
        try:
            token = run.sampler.sample(logits)
        except (DeadEnd, LimitExceeded) as error:
            if -math.inf < logits.max() < math.inf:
                param = job.grammar.param if job.grammar is not None else "logit_bias"
                self._cancel(task, InvalidGrammar(param, f"it allows no further token: {error}"))
            else:
                self._cancel(task, EngineError(NOT_FINITE))
            return False
        run.sampled += 1
        run.history.append(token)
        run.wanted += 1
        is_drafted = bool(run.draft) and run.draft[0] == token
        if is_drafted:
            del run.draft[0]
            run.accepted += 1
        if token in task.stop_tokens:
            self._finish(run, "stop", task.stop_tokens[token], run.sampled - 1)
            return False
        tokens = self._tokens_of(run, token, row) if job.logprobs is not None else ()
        if token in self._vocabulary.ends:
            self._finish(run, "end", None, run.sampled - 1, *tokens)
            return False
        is_control = token in task.preserved
        data = task.preserved[token] if is_control else self._vocabulary.pieces[token]
        if data or tokens or job.stops.by_reader:
            piece = Piece(run.choice.index, data, tokens, is_control, 1)
            if task.is_whole:
                run.held.append(piece)
            else:
                self._deliver(task, piece)
        if job.stops.for_engine:
            run.cut.add(data)
            if run.cut.stop is not None:
                self._finish(run, "stop", run.cut.stop, run.cut.tokens)
                return False
        if run.sampled >= task.max_tokens:
            self._finish(run, "length", None, run.sampled)
            return False
        return is_drafted

    def _tokens_of(self, run: Run, token: int, row: int) -> list[Token]:
        """Return the sampled token with the log-probabilities at its position."""
        logits = self._context.logits(row, 1)
        spelling, control = self._vocabulary.token(token)
        task = run.choice.task
        data = b"" if token in self._vocabulary.ends else self._vocabulary.pieces[token]
        data = task.preserved.get(token, data)
        sampled = (token, data, spelling, control)
        top = task.job.logprobs or 0
        return score(logits, [sampled], top, self._vocabulary, self._scratch)

    def _finish(
        self,
        run: Run,
        reason: Reason,
        stop: str | None,
        completion: int,
        end: Token | None = None,
    ) -> None:
        choice = run.choice
        prompt_tokens = choice.task.prompt_tokens
        run.completion = completion
        finish = Finish(
            choice.index, reason, stop, prompt_tokens, completion, run.cached, end,
            accepted_tokens=run.accepted, rejected_tokens=run.drafted - run.accepted,
        )  # fmt: skip
        self._deliver(choice.task, *run.held, finish)
        if choice.preempted is None:
            self._release(run)
        else:
            self._waiting.take(choice)
            run.sampler.close()
            self._full = False

    def _fail(self, batch: list[Run], error: DecodeFailed) -> None:
        """End the tasks of a batch that could not be evaluated; the others continue."""
        for task in dict.fromkeys(run.choice.task for run in batch):
            self._cancel(task, EngineError(f"llama.cpp failed: {error}."))
        for run in batch:
            self._release(run, keeps=False)

    def _cancel(self, task: Task, error: LatimerError) -> None:
        """End a task with an error; the next step drops its choices."""
        task.cancelled = True
        self._outbox.append((task, error))

    def _release(self, run: Run, keeps: bool = True) -> None:
        """Drop a sequence that runs.

        Args:
            keeps: False if a later prompt cannot reuse it.
        """
        self._running.remove(run)
        run.sampler.close()
        self._full = False
        if keeps:
            self._end_draft(run)
            self._cache.rest(run.slot)
        else:
            self._cache.drop(run.slot)

    def _deliver(self, task: Task, *events: Event) -> None:
        """Add events to what the step delivers; what follows without a gap is one delivery."""
        before = self._outbox[-1] if self._outbox else None
        if before is not None and before[0] is task and isinstance(before[1], tuple):
            self._outbox[-1] = task, (*before[1], *events)
        else:
            self._outbox.append((task, events))

    def _flush(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            self._post(outbox)
