"""From the steps that a framework counts to synchronized backwards, for those that know how many there will be."""

from __future__ import annotations

from collections.abc import Callable

from lightning_commhooks.ddp.attachment import Attachment


class Pace:
    """Tells once what training will do, in a framework that counts its steps otherwise than a hook does.

    There may be several synchronized backwards in one of its steps, as with several optimizers; and after a resume the
    hook may count from another step on.
    """

    def __init__(self) -> None:
        self._attachment: Attachment | None = None
        self._begin = (0, 0)

    def tell(
        self, attachment: Attachment, say: Callable[[str], None] | None, steps: Callable[[], tuple[int, float]]
    ) -> None:
        """Call it between the same two things in each step, on all ranks; see `Attachment.tell_forecast`.

        Args:
            attachment: the hook at work.
            say: see there.
            steps: how many steps of the framework there were, and will have been at the end of training; infinite or
                below 0: unknown.
        """
        if attachment is not self._attachment or steps()[0] < self._begin[0]:
            self._attachment, self._begin = attachment, (steps()[0], attachment.num_steps)
        if not attachment.is_forecast_due:
            return
        (before, backwards), (done, num_steps) = self._begin, steps()
        if done == before:
            return
        left = None
        if done <= num_steps < float("inf"):
            left = round((num_steps - done) * (attachment.num_steps - backwards) / (done - before))
        attachment.tell_forecast(say, left)
