"""run(): search over many models, each of which is a Shoal run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from shoal.core.catalogue import check_word
from shoal.core.devices import on_device
from shoal.core.errors import CheckpointError, WorkerFailed
from shoal.core.limits import PATIENCE_SECONDS
from shoal.core.task import Task
from shoal.launch.stop_signals import temporary_folder
from shoal.programs.tasks import TASKS
from shoal.records.recording import record_run
from shoal.records.run_store import RunDescription, RunStore, open_store
from shoal.replicas.module import build_model
from shoal.runs.evaluation import Score, evaluate
from shoal.runs.processes import check_it_travels
from shoal.search import METHODS
from shoal.search.controller import Controller, Watcher, finite
from shoal.search.search_folder import MODEL, PIECES, check_search_folder, piece_folder
from shoal.search.search_journal import SearchJournal
from shoal.search.search_result import SearchResult, tell_pieces, tell_trials
from shoal.search.searcher import METRICS, TRIAL_TRANSPORTS, Searcher, SearchMethod
from shoal.search.slots import Slots
from shoal.search.space import Space, SpaceLike, read_space
from shoal.search.trial_plan import TrialSettings
from shoal.storage.model_file import load_model, save_model
from shoal.strategies import STRATEGIES
from shoal.vocabulary.strategy import Strategy


def run(
    task: Task | str,
    space: SpaceLike,
    method: SearchMethod | str = "pbt",
    *,
    epochs: int = 100,
    at_once: int | None = None,
    strategy: Strategy | str = "single",
    workers: int = 1,
    servers: int = 1,
    codec: str | None = None,
    transport: str = "processes",
    device: str | None = None,
    held_out: float = 0.2,
    metric: str = "accuracy",
    seed: int = 0,
    folder: str | Path | None = None,
    resume: bool = False,
    threads: int | None = None,
    timeout: float = 300.0,
    patience: float = PATIENCE_SECONDS,
    watcher: Watcher = lambda what, event: None,
    on_start: Callable[[Slots], None] = lambda slots: None,
    runs: str | Path | RunStore | None = None,
) -> SearchResult:
    """Search `space` for the hyper-parameters with which `task` trains best, and return what was found.

    `space` maps names to ranges: {"lr": ("log", 1e-4, 1.0), "batch": [16, 32, 64], "momentum": (0.0, 0.99)}.
    Names are lr, batch, codec, architecture, the options of the task's optimizer, and strategy.NAME.
    `method` is "random", "asha", "pbt", "evolution", "hierarchical", "pso" or "optuna", with options as in
    "pbt:population=16", or an object such as PBT(population=16). `epochs` is the budget of all trials
    together, in passes over the training set without the share `held_out`, on which trials are scored. The
    test set is used once, for the best model.
    A trial is a run of one worker, or of `workers` that `strategy` synchronises. `at_once` trials train at a
    time; by default as many as there are cores for. A trial whose process is killed continues from its last
    checkpoint; one that is silent for `patience` seconds is killed.
    `device` is "cpu", "cuda" or "auto", as for `shoal.run`.
    `folder` keeps the journal, the checkpoints and the best model; with `resume` a search that is there goes
    on. Without a folder nothing is kept. `runs` is a folder in which the search is listed as a run. `watcher`
    is called with every event of the journal, `on_start` with the slots, which know the processes that train.
    Raises ValueError for a name or value that no run could use, before anything starts; Interrupted after
    Ctrl-C.
    """
    chosen = TASKS.read(task) if isinstance(task, str) else task
    chosen = on_device(chosen, device)
    way = METHODS.read(method) if isinstance(method, str) else method
    found = read_space(space)
    check_word("metric", metric, METRICS)
    check_word("transport", transport, TRIAL_TRANSPORTS)
    if epochs < 1 or (at_once is not None and at_once < 1):
        raise ValueError(f"epochs={epochs} and at_once={at_once} must be at least 1")
    word, options = split_strategy(strategy)
    settings = TrialSettings(
        chosen, word, options, codec, workers, servers, transport, held_out, seed, threads, timeout, patience
    )
    at_once = at_once or settings.fitting()
    search = _Search(settings.sharing(at_once), found, way, epochs, metric, at_once)
    search.check()
    with _kept_in(folder, resume) as place, SearchJournal(place) as journal:
        search.begin(journal)
        about = RunDescription(chosen.name, search.word, search.at_once, 0, search.config())
        with record_run(about, open_store(runs), ()) as kept:
            result = search.see_through(place, journal, watcher, on_start)
            kept.done(result.run_record())
    return result


@dataclass
class _Search:
    """All settings of a search, and what is done with them."""

    settings: TrialSettings
    space: Space
    method: SearchMethod
    epochs: int
    metric: str
    at_once: int

    @property
    def word(self) -> str:
        return METHODS.name_of(self.method)

    def check(self) -> None:
        """Raise ValueError for what could not run, before anything starts."""
        self.method.check(self.space)
        self.method.check_budget(self.epochs)
        self.settings.check(self.space)
        check_it_travels(self.settings, self.settings.task, "the processes of trials")
        if self.settings.plan({}).strategy.independent:
            raise ValueError("strategy 'ensemble' trains models of its own; search with another strategy")
        if not self.searcher().has_more:
            raise ValueError(f"epochs={self.epochs} is too few for a single trial of {self.method}")
        self.settings.trial_task({}).data()  # also downloads it, once for all trials

    def searcher(self) -> Searcher:
        fixed = self.settings.fixed(self.space)
        return self.method.searcher(self.space, self.epochs, self.settings.seed, fixed)

    def config(self) -> dict[str, Any]:
        """The settings that must be the same for a search to be resumed."""
        own = self.settings
        return {
            **own.task.config(),
            "method": METHODS.text_of(self.method),
            "space": self.space.text(),
            "epochs": self.epochs,
            "metric": self.metric,
            "strategy": own.strategy,
            "strategy_options": dict(own.options),
            "codec": own.codec,
            "workers": own.workers,
            "servers": own.servers,
            "transport": own.transport,
            "held_out": own.held_out,
            "seed": own.seed,
        }

    def begin(self, journal: SearchJournal) -> None:
        """Write the settings down, or compare them with those of the search that is there."""
        folder = journal.path.parent
        if not journal.events:
            journal.append({"event": "begin", "time": 0.0, "config": self.config()})
            return
        saved, now = journal.events[0].get("config", {}), self.config()
        differ = [name for name in sorted({*saved, *now}) if saved.get(name) != now.get(name)]
        if differ:
            told = ", ".join(f"{name}={saved.get(name)!r} (now {now.get(name)!r})" for name in differ)
            raise CheckpointError(f"the search in {folder} is another one: {told}. Use the same settings.")

    def see_through(
        self, place: Path, journal: SearchJournal, watcher: Watcher, on_start: Callable[[Slots], None]
    ) -> SearchResult:
        """Train all trials, then test the best model once."""
        pieces = place / PIECES
        pieces.mkdir(exist_ok=True)
        with temporary_folder() as temporary:
            slots = Slots(self.settings, pieces, self.at_once, temporary)
            controller = Controller(self.searcher(), slots, journal, pieces, self.metric, watcher)
            on_start(slots)
            controller.run()
        return self._conclude(controller, journal, place)

    def _conclude(self, controller: Controller, journal: SearchJournal, place: Path) -> SearchResult:
        searcher = controller.searcher
        if searcher.best is None:
            messages = [event["message"] for event in journal.events if event.get("message")]
            raise WorkerFailed(f"no trial has a score; the first said: {(messages or ['nothing'])[0]}")
        score, number = searcher.best
        best = searcher.pieces[number]
        model = self._load(best.values, piece_folder(place / PIECES, number))
        save_model(place / MODEL, model.state_dict())
        end = next((event for event in journal.events if event["event"] == "end"), None)
        if end is None:
            tested = self._test(model, best.values)
            figures = {name: finite(value) for name, value in asdict(tested).items()}
            end = {"event": "end", "time": controller.seconds, **figures, "metrics": None}
            journal.append(end)
        told = tell_pieces(searcher, journal.events)
        epochs = sum(piece["end"] - piece["begin"] for piece in told if piece["time"] is not None)
        return SearchResult(
            method=self.word,
            task=self.settings.task.name,
            metric=self.metric if told[number]["accuracy"] is not None else "loss",
            best={
                "trial": best.trial,
                "piece": number,
                "score": score,
                "epochs": best.end,
                "values": best.values,
            },
            test_accuracy=end["accuracy"],
            test_loss=end["loss"],
            seconds=end["time"],
            epochs=epochs,
            samples=self.settings.samples(epochs),
            kills=controller.kills,
            trials=tell_trials(searcher, told),
            pieces=told,
            config=self.config(),
            space=self.space,
            model=model,
        )

    def _load(self, values: dict[str, Any], folder: Path) -> nn.Module:
        model = build_model(self.settings.trial_task(values, whole=True), self.settings.seed)
        model.load_state_dict(load_model(folder / MODEL))
        return model

    def _test(self, model: nn.Module, values: dict[str, Any]) -> Score:
        """The one use of the test set."""
        task = self.settings.trial_task(values, whole=True)
        return evaluate(model, task, task.data())


def split_strategy(strategy: Strategy | str) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """The word of a strategy and its options, from "bmuf:period=8" or an object."""
    made = STRATEGIES.read(strategy) if isinstance(strategy, str) else strategy
    word = STRATEGIES.name_of(made)
    if word not in STRATEGIES:
        raise ValueError(f"{word} is a strategy of your own; a search takes those of: shoal list strategies")
    defaults = STRATEGIES.options(word)
    options = {name: getattr(made, name) for name in defaults}
    return word, tuple((name, v) for name, v in options.items() if v != defaults[name].default)


@contextmanager
def _kept_in(folder: str | Path | None, resume: bool) -> Iterator[Path]:
    """The search's folder; a temporary one where none is named."""
    if folder is None:
        if resume:
            raise ValueError("resume=True goes on with the search in a folder; name it with folder=DIR")
        with temporary_folder("shoal-search-") as temporary:
            yield Path(temporary)
        return
    check_search_folder(Path(folder), resume)
    yield Path(folder)
