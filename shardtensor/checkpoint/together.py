"""The processes of a job while they save and restore: an error of one is an error in all of them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from shardtensor.backend.protocol import current_device
from shardtensor.communication.between_processes.processes import JOB
from shardtensor.errors import DistributedError, NotAddressableError, message_of

T = TypeVar("T")


class JobPart:
    """This process as one of those that call a function together; without a job, it is the only one.

    Args:
        caller: the function.
        timeout: seconds that each process waits for the others; None for those of the job.

    Raises:
        NotAddressableError: a mapped function in a job calls it.

    Attributes:
        caller: the function.
        index: the number of this process.
        count: the number of processes.
        timeout: the seconds.
    """

    def __init__(self, caller: str, timeout: float | None = None) -> None:
        self.caller = caller
        self._job = JOB.agreement
        if self._job is not None and current_device() is not None:
            raise NotAddressableError(
                f"{caller}: a mapped function, which runs once for each device, calls it in a job of processes; "
                "call it outside, with what the map returns"
            )
        self.index = self._job.engine.process_index if self._job else 0
        self.count = self._job.engine.process_count if self._job else 1
        self.timeout = timeout if timeout is not None else self._job.timeout if self._job else 0.0

    @property
    def is_broken(self) -> bool:
        """Whether the processes cannot exchange anything any more."""
        return self.count > 1 and (JOB.agreement is not self._job or bool(JOB.agreement and JOB.agreement.broken))

    def gather(self, what: str, text: str) -> list[str]:
        """Returns the texts of all processes.

        Raises:
            DistributedError: the processes do not call the same, or do not all come in time.
        """
        if self._job is None or self.count == 1:
            return [text]
        with self._waiting():
            return self._job.gather_texts(f"{self.caller}: {what}", text)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        assert self._job is not None
        before, self._job.timeout = self._job.timeout, self.timeout
        try:
            yield
        finally:
            self._job.timeout = before

    def agree(self, what: str, error: BaseException | None) -> None:
        """Raises the error, if this process has one, and one that names the process where another has one.

        Raises:
            DistributedError: another process has an error, or does not come in time.
        """
        texts = self.gather(what, "" if error is None else " ".join(message_of(error).split())[:2000] or "error")
        if error is not None:
            raise error
        for k, text in enumerate(texts):
            if text:
                raise DistributedError(f"{self.caller}: process {k} failed: {text}")

    def together(self, what: str, function: Callable[[], T]) -> T:
        """Returns what a function returns in this process; an error of any process is raised in all of them."""
        result: T | None = None
        failure: Exception | None = None
        try:
            result = function()
        except Exception as error:  # It is raised below, when all processes know of it.
            failure = error
        self.agree(what, failure)
        return result  # type: ignore[return-value]

    def check_same(self, rows: Sequence[str], advice: str) -> None:
        """Checks that all processes have the same texts.

        Raises:
            DistributedError: they do not; the error has the first text that differs.
        """
        if self.count == 1:
            return
        texts = "\n".join(rows)
        digests = self.gather("comparison", hashlib.blake2b(texts.encode(errors="surrogatepass")).hexdigest())
        other = next((k for k, digest in enumerate(digests) if digest != digests[0]), None)
        if other is None:
            return
        everywhere = self.gather("difference", texts.encode(errors="backslashreplace").decode())
        pairs = itertools.zip_longest(everywhere[0].split("\n"), everywhere[other].split("\n"), fillvalue="nothing")
        first, second = next(pair for pair in pairs if pair[0] != pair[1])
        raise DistributedError(
            f"{self.caller}: process 0 has {first[:200]}, and process {other} has {second[:200]}; {advice}"
        )
