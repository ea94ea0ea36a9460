"""What a long measurement says while it runs: plain lines, fit for a log."""

import sys
import time


def say(text):
    # One write, for several threads may have something to say.
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def clock(seconds):
    """75 -> ``1 min 15 s``"""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


class Progress:
    """One line a benchmark: what is done, and how much is left."""

    def __init__(self, pages):
        self.points = sum(sum(page.points.values()) for page in pages)
        self.count = 0
        self.start = time.monotonic()

    def done(self, page, message):
        points = len(message["measured"]["rows"])
        reason = message["measured"].get("reason")
        self.count += points
        # A benchmark whose compiling failed early was not counted.
        self.points = max(self.points, self.count)
        spent = time.monotonic() - self.start
        left = spent / self.count * (self.points - self.count)
        say(
            f"{page.name}: {message['benchmark']}: {points} points in "
            f"{message['seconds']:.1f} s, {message['timed']:.1f} s of it "
            f"timing; {self.count} of {self.points} points, "
            f"{clock(spent)} so far, {clock(left)} left"
            + (f"; not counted: {reason}" if reason else "")
        )
