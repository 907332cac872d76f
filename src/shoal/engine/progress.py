"""Progress: how far a node is, and who still works. Nothing else writes these numbers."""

from __future__ import annotations

from typing import Any


class Progress:
    """Steps, gradients and samples of one node, and the workers that have not gone.

    A sample is merged once it is in the model that this node holds, whichever worker it was of.
    """

    def __init__(self, workers: int) -> None:
        self.t = 0  # steps done
        self.clock = 0  # gradients taken
        self.version = 0  # server: versions of the model since the start
        self.merged = 0.0  # samples in the model, of all workers
        self.unmerged = 0.0  # own samples since the last mean or push
        self.began = 0  # the clock at that mean or push
        self.samples = 0  # own samples in all
        self.samples_before = 0  # own samples before the checkpoint that this run resumed from
        self.has_ended = False  # whether this worker's data has, while others may go on
        self._workers = workers
        self._places: dict[int, int] = {}  # of other workers: batches of their shares that are done
        self._deaths: dict[int, int] = {}  # worker -> how often it was lost or started again
        self._gone: set[int] = set()  # workers; a set of those that stay would be large at each of thousands

    # -- a worker's steps ----------------------------------------------------------------------

    def finish_step(self) -> None:
        """One more step is done."""
        self.t += 1

    def go_to(self, clock: int) -> None:
        """The next step is the one at this clock: a batch of another worker, or the end of the own share."""
        self.t = self.clock = clock

    def pass_to(self, step: int) -> None:
        """This worker has no data any more, and takes part in the others' averages: they are at that step."""
        self.t = step

    def save_at(self, step: int) -> None:
        """At a server: a checkpoint of all nodes before this step is being written."""
        self.t = step

    def count_gradient(self, samples: int) -> None:
        """One more gradient was computed, on so many samples."""
        self.clock += 1
        self.unmerged += samples
        self.samples += samples

    def discard(self, samples: float) -> None:
        """The last gradients count for nothing: those of another worker were taken instead."""
        self.unmerged -= samples
        self.samples -= int(samples)

    def end_data(self) -> None:
        """The training loop ended; others may go on."""
        self.has_ended = True

    # -- samples in the model ------------------------------------------------------------------

    @property
    def block_began(self) -> int:
        """The first step whose gradient is not in the last mean or push."""
        return self.t - (self.clock - self.began)

    def take_unmerged(self) -> float:
        """The own samples since the last merge; from now on they count as handed over."""
        taken, self.unmerged, self.began = self.unmerged, 0.0, self.clock
        return taken

    def merge(self, samples: float) -> None:
        """So many more samples are in the model."""
        self.merged += samples

    def merge_part(self, samples: float, part: int, whole: int) -> None:
        """So many more samples are in `part` of the model's `whole` elements.

        Counted by elements, which are whole numbers: when all parts are in, so is every sample.
        """
        if part == whole:
            self.merged += round(samples)
        else:
            self.merged = (round(self.merged * whole) + round(samples) * part) / whole

    def hold(self, samples: float) -> None:
        """The model has been replaced by one with so many samples in it."""
        self.merged = samples

    def advance(self, samples: float) -> None:
        """At a server: the model is a new version with so many more samples in it."""
        self.version += 1
        self.merged += samples

    # -- who still works -----------------------------------------------------------------------

    @property
    def anybody_works(self) -> bool:
        """Whether a worker is left."""
        return len(self._gone) < self._workers

    def works(self, rank: int) -> bool:
        """Whether that worker has not gone."""
        return rank < self._workers and rank not in self._gone

    def note_departure(self, rank: int, died: bool) -> None:
        """A node has gone."""
        if rank < self._workers:
            self._gone.add(rank)
            self._deaths[rank] = self._deaths.get(rank, 0) + died

    @property
    def deaths(self) -> int:
        """How often a worker has died, as far as this node has heard; never falls."""
        return sum(self._deaths.values())

    def note_place(self, rank: int, place: int) -> None:
        """That worker has said that so many batches of its share are done."""
        self._places[rank] = max(place, self._places.get(rank, 0))

    def place_of(self, rank: int) -> int:
        """Batches of that worker's share that it has said to be done."""
        return self._places.get(rank, 0)

    def note_return(self, rank: int, incarnation: int) -> None:
        """A worker that was lost is back."""
        self._gone.discard(rank)
        self._deaths[rank] = max(self._deaths.get(rank, 0), incarnation)

    def start_over(self) -> None:
        """All workers resume from a checkpoint."""
        self._gone.clear()

    # -- checkpoints ---------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything but who works, which the peers tell."""
        return {
            "step": self.t,
            "clock": self.clock,
            "version": self.version,
            "merged": self.merged,
            "unmerged": self.unmerged,
            "began": self.began,
            "samples": self.samples,
        }

    def begin_at(self, step: int, left: dict[str, Any], unmerged: float = 0.0) -> None:
        """Begin before `step` with the model that a worker left."""
        self.t = self.clock = step
        self.version, self.merged = left["version"], left["merged"]
        self.began = step - (left["clock"] - left["began"])
        self.unmerged = unmerged

    def credit(self, samples: int) -> None:
        """Count so many samples, taken before this run was resumed, as this worker's."""
        self.samples += samples
        self.samples_before += samples

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.t, self.clock, self.version = state["step"], state["clock"], state["version"]
        self.merged, self.unmerged, self.began = state["merged"], state["unmerged"], state["began"]
        self.samples = self.samples_before = state["samples"]
