"""The decoding thread: one batch, which requests join and leave between two steps."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from ..api.decoder import SpeculativeDecoder
from ..engine.batch import Batch
from ..engine.step import StepRecord
from .counters import Counters
from .jobs import Job

logger = logging.getLogger(__name__)


class QueueFullError(Exception):
    """As many requests wait as may."""


class DecodingThread(threading.Thread):
    """Decodes requests in the order in which they came, several in each pass.

    Args:
        decoder: of the model; nobody else decodes with it.
        name: the model's, in counters.
        batch_size: most texts under way.
        max_queue: most requests that wait for a place.
    """

    def __init__(
        self, decoder: SpeculativeDecoder, name: str, batch_size: int, max_queue: int
    ) -> None:
        super().__init__(name="decoding", daemon=True)
        self._decoder, self._size, self._max_queue = decoder, batch_size, max_queue
        self._waiting: deque[Job] = deque()
        self._running: set[Job] = set()
        self._changed = threading.Condition()
        self._is_closing = False
        self.counters = Counters(name, lambda: len(self._running), lambda: len(self._waiting))
        self._batch = self._new_batch()  # measures what nodes cost, once

    def submit(self, job: Job) -> None:
        """Let a request wait for a place; callable from any thread.

        Raises:
            QueueFullError: if too many wait.
            RuntimeError: if nothing is decoded any more.
        """
        with self._changed:
            if self._is_closing:
                raise RuntimeError("the decoding thread has ended")
            if len(self._waiting) >= self._max_queue + (self._size - len(self._running)):
                raise QueueFullError
            self._waiting.append(job)
            self._changed.notify()

    def close(self) -> None:
        """End after the step under way; requests that are left get an error."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    def run(self) -> None:
        """Decode until closed."""
        try:
            while self._has_work():
                self._give_up()
                self._admit()
                if self._running:
                    self._step()
        finally:
            with self._changed:
                self._is_closing = True
                left = [*self._running, *self._waiting]
                self._running.clear()
                self._waiting.clear()
            for job in left:
                job.send(RuntimeError("the server ends"))

    def _new_batch(self) -> Batch:
        return self._decoder.texts.batch(self._size)

    def _has_work(self) -> bool:
        """Wait for requests; return False when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._running or self._is_closing)
            return not self._is_closing

    def _give_up(self) -> None:
        """Let requests leave that were cancelled, or that take too long."""
        now = time.monotonic()
        for job in [job for job in self._running if job.is_cancelled or now > job.deadline]:
            self._running.discard(job)
            self._batch.remove(job)
            self._dropped(job)
        with self._changed:
            gone = [job for job in self._waiting if job.is_cancelled or now > job.deadline]
            for job in gone:
                self._waiting.remove(job)
        for job in gone:
            self._dropped(job)

    def _dropped(self, job: Job) -> None:
        self.counters.end("abort")
        if not job.is_cancelled:
            job.send(TimeoutError())

    def _admit(self) -> None:
        """Let requests that wait join the batch, as many as have room."""
        while self._batch.has_room:
            with self._changed:
                if not self._waiting:
                    return
                job = self._waiting.popleft()
                self._running.add(job)
            job.begun = time.monotonic()
            try:
                self._batch.add(job, job.request)
            except Exception as error:  # such as no memory for its rows
                self._failed(job, error)
            else:
                self.counters.begin(len(job.request.prompt_ids))

    def _step(self) -> None:
        try:
            events = self._batch.step()
        except Exception as error:  # of the pass: its texts are lost, others are served
            self._batch.close()
            for job in list(self._running):
                self._failed(job, error)
            self._batch = self._new_batch()
            return
        for event in events:
            if event.error is not None:
                self._failed(event.key, event.error)
            if event.record is not None:
                self._take(event.key, event.record)

    def _take(self, job: Job, record: StepRecord) -> None:
        """Hand on what a step brought; a text that ends leaves."""
        try:
            piece = job.piece(record)
        except Exception as error:  # of the tokenizer
            if record.stop_reason is None:
                self._batch.remove(job)
            self._failed(job, error)
            return
        self.counters.step(job.acceptance.steps[-1])
        if piece.finish_reason is not None:
            self.counters.end(piece.finish_reason)
            self._running.discard(job)
            if record.stop_reason is None:  # a stop string, of which the batch knows nothing
                self._batch.remove(job)
        job.send(piece)

    def _failed(self, job: Job, error: Exception) -> None:
        logger.error("a request failed", exc_info=error)
        self.counters.end("error")
        self._running.discard(job)
        job.send(error)
