"""`Lessons`: internal requests from which an engine learns its noise, where hits touch all requests of users."""

from canary_adapters.internal_requests import LEAST_TOKENS, InternalRequests, Running

LESSON = "canary-lesson"
"""Stands for a request asked for by workers: some touched request has no verdict, as the noise is not known."""

LESSON_TOKENS = 2 * LEAST_TOKENS
"""New tokens of a lesson: enough to teach, and as many until it is computed again."""

AT_ONCE = 8
"""Lessons begun after each `LESSON`; so many teach noise where paths differ."""

PATIENCE = 64
"""Looks at which a fresh request on the way is awaited in the place of a lesson."""

MOST_LESSONS = 48
"""Lessons compared in the life of a scheduler."""


class Lessons:
    """Lessons of a scheduler, never two at a time. A lesson has the tokens of a user's request and begins with nothing
    in the cache, so is fresh; decodes in the batches of users; and once `ready` is computed again as any request.

    Before the first decode a lesson ends as soon as a request of a user waits; then, as users come all the time, once a
    batch has left a request waiting or preempted the lesson; and with the last request of a user.
    """

    def __init__(self, engine: InternalRequests) -> None:
        self._engine = engine
        self._left, self._done, self._tokens, self._looks = 0, 0, 0, 0
        self._user_first = False
        self.name: str | None = None
        """Of the present lesson."""

    def want(self) -> None:
        """The workers lack lessons: `AT_ONCE` begin, unless some are still to come."""
        if not self.wanted and self._done < MOST_LESSONS:
            self._left, self._looks = AT_ONCE, 0

    @property
    def wanted(self) -> bool:
        """Whether there is a lesson, or is to be."""
        return self.name is not None or self._left > 0

    def due(self, coming: bool, touched: bool) -> bool:
        """Whether a lesson is to begin at this look. coming: whether an untouched request runs, and may teach after
        more decodes. touched: whether a touched request could be computed again in the place of a lesson."""
        if self.name is not None or not self._left or (touched and self._user_first):
            return False
        self._looks += 1
        return not coming or self._looks > PATIENCE

    def begin(self, name: str, target: Running) -> bool:
        """With the tokens of ``target``, if room for an answer is left."""
        self._left -= 1
        fits = target.tokens + LESSON_TOKENS <= self._engine.longest
        if not fits or self._engine.begin(name, target.name, target.tokens, LESSON_TOKENS) is not None:
            return False
        self.name, self._tokens = name, target.tokens
        return True

    def ready(self) -> Running | None:
        """The present lesson, with enough decoded and room for a second computation."""
        found = None if self.name is None else self._engine.find(self.name)
        ready = found is not None and found.decoded >= LEAST_TOKENS and self._engine.room(found.name)
        return found if ready else None

    def hindered(self, made: bool) -> bool:
        """Whether the present lesson is over, or in the way of a user. made: whether a batch was just made, and not
        about to be."""
        if self.name is None:
            return False
        computed = self._engine.computed(self.name)
        return not computed or ((made or computed < self._tokens) and self._engine.crowded(self.name))

    def compared(self) -> None:
        """The present lesson goes to the workers with this batch."""
        self._done += 1
        self.end()

    def give_up(self, user_first: bool) -> None:
        """Ends the present lesson too soon. user_first: before the next lesson a request of a user is computed again,
        though without a verdict."""
        self.end()
        self._user_first = user_first

    def began_other(self) -> None:
        """A second computation of a request or prefix begins."""
        self._user_first = False

    def end(self) -> None:
        """Ends the present lesson."""
        name, self.name = self.name, None
        if name is not None:
            self._engine.end(name)

    def stop(self) -> None:
        """No lesson begins any more, and the present lesson goes on to the end."""
        self._left, self.name = 0, None
