"""Which gradients need zeros to be added to, and which are put in place of whatever memory holds. Pure.

A matrix product can add to what is there or overwrite it. Whether a parameter's first gradient of a step comes from
such a product shows in the step before: where it did, the parameter is left out when gradients are set to zero, and if
something else turns out to come first, or nothing at all, its zeros are made up for then.
"""

from collections.abc import Mapping

Run = tuple[int, int]  # elements (start, stop)


class FirstGrads:
    """Of parameters that lie in `numel` elements, each in its run, in ascending order."""

    def __init__(self, runs: Mapping[str, Run], numel: int):
        self._runs, self._numel = runs, numel
        self._overwritten: set[str] = set()  # those that a product came first to, once
        self._opened: set[str] = set()  # those that something was added to
        self.unset: set[str] = set()  # those whose gradient is neither zeros nor a sum
        self.zeroed, self.left = self._divide()

    def begin(self) -> None:
        """No gradient is there, and the runs `zeroed` are being set to zero."""
        self._opened, self.unset = set(), set(self._overwritten)

    def open(self, name: str, *, overwrites: bool) -> tuple[bool, bool]:
        """A gradient is about to be added by somebody who may overwrite instead. (whether to set zeros for it, whether
        it must overwrite)."""
        if name in self._opened:
            return False, False
        self._opened.add(name)
        if overwrites and name not in self._overwritten:
            self._overwritten.add(name)
            self.zeroed, self.left = self._divide()
        is_unset = name in self.unset
        self.unset.discard(name)
        return is_unset and not overwrites, is_unset and overwrites

    def _divide(self) -> tuple[list[Run], list[Run]]:
        """All elements: those that are set to zero before a step, and those that are left as they are."""
        first, zeroed, left = 0, [], []
        for name, (start, stop) in self._runs.items():
            if name in self._overwritten:
                zeroed.append((first, start))
                left.append((start, stop))
                first = stop
        zeroed.append((first, self._numel))
        return [run for run in zeroed if run[0] < run[1]], left
