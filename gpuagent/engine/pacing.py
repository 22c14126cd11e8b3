"""How much of a step may go to prompts, from what steps have cost so far.

A step's time is close to a straight line in its extra tokens, those beyond one per request:

    seconds = base + per_extra * num_extra

`LinearCost` fits that line to the measured steps, the older ones counting less. `Pace` turns
it into a budget. Example, target inter-token time 100 ms, measured base 40 ms and 0.5 ms for
each prompt token:

    1 waits, 15 decode   (100 - 40) / 0.5  ->  120 prompt tokens in this step
    base is 70 ms        prompts get as much time as decoding, 70 ms  ->  140 tokens
    12 wait, 4 decode    thrice the target, (300 - 40) / 0.5  ->  520 tokens
    nobody decodes       the whole token budget: there is nobody to keep waiting

(Requests count by the weight of their class. For a standard or batch prompt decoding requests of
class batch count as nobody, and for a realtime prompt standard ones too.)

The second case is why the target is not a promise: with more requests decoding than the target
allows, prompts held to the remainder would never be computed and slots would stay empty. The third
is why it is not even a bound: a burst of prompts held to the target fills the batch so slowly that
all wait longer, those that decode included; 16 at once had their first token after 2.4 instead of
1.4 s in the median. No clock in here: whoever runs the steps reports their seconds. A controller
that only shrinks and grows the budget (AIMD) was rejected: it forgets what it knows whenever the
batch changes.
"""

FORGETTING = 0.95  # weight of the past after each step: about the last 20 steps count
OUTLIER = 4.0  # a pause of the machine counts at most this many times the expected time
MIN_CHUNK = 16
MIN_VARIANCE = 0.01  # of num_extra, below which no slope can be read from the points


class LinearCost:
    """Least squares of seconds over num_extra with exponential forgetting."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.num_observed = 0
        self.per_extra = 0.0

    @property
    def base(self) -> float:
        """Seconds of a step without extra tokens; 0 before the first observation."""
        if not self._weight:
            return 0.0
        return max(self._y - self.per_extra * self._x, 0.0) / self._weight

    def predict(self, num_extra: int) -> float:
        """Expected seconds."""
        return self.base + self.per_extra * num_extra

    def observe(self, num_extra: int, seconds: float) -> None:
        """Learn from one step."""
        if self.num_observed >= 8:
            seconds = min(seconds, OUTLIER * self.predict(num_extra))
        self.num_observed += 1
        terms = (1.0, num_extra, seconds, num_extra * num_extra, num_extra * seconds)
        sums = (self._weight, self._x, self._y, self._xx, self._xy)
        self._weight, self._x, self._y, self._xx, self._xy = (
            FORGETTING * total + term for total, term in zip(sums, terms, strict=True)
        )
        self._fit()

    def _fit(self) -> None:
        """Keeps the last slope while all points lie at one place."""
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance > MIN_VARIANCE:
            self.per_extra = max(0.0, (self._xy / self._weight - mean_x * mean_y) / variance)
        elif self.per_extra == 0.0 and mean_x > 0:
            self.per_extra = mean_y / mean_x  # too much rather than too little


class Pace:
    """The prompt tokens that a step may compute beside decoding requests."""

    def __init__(self, max_tokens: int, target_seconds: float | None) -> None:
        self._max_tokens = max_tokens
        self._target = target_seconds
        self.cost = LinearCost()

    def prompt_budget(self, num_decoding: float, num_waiting: float = 0.0) -> int:
        """Tokens, between MIN_CHUNK and the whole budget; requests counted by weight."""
        if self._target is None or num_decoding == 0 or self.cost.per_extra == 0.0:
            return self._max_tokens
        base = self.cost.base
        target = self._target * max(1.0, num_waiting / num_decoding)
        room = max(target - base, base)
        num_tokens = min(room / self.cost.per_extra, self._max_tokens)
        return min(max(int(num_tokens), MIN_CHUNK), self._max_tokens)
