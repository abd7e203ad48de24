"""`Lessons`: internal requests from which an engine learns its noise, where hits touch all requests of users."""

from canary_adapters.internal_requests import LEAST_TOKENS, InternalRequests, Running

LESSON = "canary-lesson"
"""Stands for a request asked for by workers: some touched request has no verdict, as the noise is not known."""

LESSON_TOKENS = 2 * LEAST_TOKENS
"""New tokens of a lesson: enough to teach, and as many until it is computed again."""

AT_ONCE = 8
"""Lessons begun after each `LESSON`; so many teach noise where paths differ."""

PATIENCE = 64
"""Looks at which a fresh request that is on its way is awaited in the place of a lesson."""

MOST_LESSONS = 48
"""Lessons that came to be compared, in the life of a scheduler."""


class Lessons:
    """A scheduler's lessons, one at a time. A lesson has the tokens of a touched request and begins with nothing in the
    cache, so it is fresh; it decodes in the batches of users. Once `ready` it is computed again as any request.

    Before it decodes it ends as soon as a request of a user waits; then, as users come all the time, once a batch has
    left one waiting or preempted the lesson; and with the last request of a user.
    """

    def __init__(self, engine: InternalRequests) -> None:
        self._engine = engine
        self._left, self._done, self._tokens, self._looks = 0, 0, 0, 0
        self.name: str | None = None
        """The present one's."""

    def want(self) -> None:
        """The workers lack lessons: so many begin, unless some of these are still to come."""
        if not self.wanted and self._done < MOST_LESSONS:
            self._left, self._looks = AT_ONCE, 0

    @property
    def wanted(self) -> bool:
        """Whether there is one, or is to be one."""
        return self.name is not None or self._left > 0

    def due(self, coming: bool) -> bool:
        """Whether one is to begin at this look. coming: whether a request runs that nothing touched, and which may
        teach once it has decoded more."""
        if self.name is not None or not self._left:
            return False
        self._looks += 1
        return not coming or self._looks > PATIENCE

    def begin(self, name: str, target: Running) -> bool:
        """With the tokens of ``target``, if they leave room for an answer."""
        self._left -= 1
        fits = target.tokens + LESSON_TOKENS <= self._engine.longest
        if not fits or self._engine.begin(name, target.name, target.tokens, LESSON_TOKENS) is not None:
            return False
        self.name, self._tokens = name, target.tokens
        return True

    def ready(self) -> Running | None:
        """The present one, if enough of it is decoded and there is room to compute it again."""
        found = None if self.name is None else self._engine.find(self.name)
        ready = found is not None and found.decoded >= LEAST_TOKENS and self._engine.room(found.name)
        return found if ready else None

    def hindered(self, made: bool) -> bool:
        """Whether the present one is over, or in the way of a user. made: whether a batch was just made; else one is
        about to be."""
        if self.name is None:
            return False
        computed = self._engine.computed(self.name)
        return not computed or ((made or computed < self._tokens) and self._engine.crowded(self.name))

    def compared(self) -> None:
        """The present one goes to the workers with this batch."""
        self._done += 1
        self.end()

    def end(self) -> None:
        """Ends the present one."""
        name, self.name = self.name, None
        if name is not None:
            self._engine.end(name)

    def stop(self) -> None:
        """None begins any more, and the present one goes on to its end."""
        self._left, self.name = 0, None
