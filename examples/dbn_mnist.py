"""A deep belief network on MNIST: python examples/dbn_mnist.py --device cuda --report dbn.html"""

import argparse
from typing import Any

import torch

from shoal.api.deep_belief import DBNClassifier, Stage
from shoal.programs.tasks.images import MNIST, load
from shoal.report import ProgressDisplay
from shoal.report.gallery import Dreams, write_gallery

DREAM_STEPS = (1, 10, 100, 1000)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="1000-1000-1000", help="hidden units, as 500-500-2000")
    parser.add_argument("--epochs", type=int, default=20, help="of pretraining, for each layer")
    parser.add_argument("--finetune", type=int, default=50, help="epochs of fine-tuning")
    parser.add_argument("--dropout", type=float, default=0.5, help="of hidden units in fine-tuning")
    parser.add_argument("--input-dropout", type=float, default=0.2)
    parser.add_argument("--pretrain-lr", type=float, default=0.05)
    parser.add_argument("--lr", type=float, default=0.1, help="of fine-tuning")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--strategy", default="sync")
    parser.add_argument("--codec", default="none")
    parser.add_argument("--transport", default="sim", help="sim: all in this process; processes: one each")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", help="folder to save to; the same command resumes from it")
    parser.add_argument("--report", help="write a page with filters, fantasies and curves to this file")
    return parser.parse_args()


def tell(stage: Stage) -> None:
    figures = "".join(f", {name} {value:.2f}" for name, value in stage.result.metrics.items())
    if stage.result.test_accuracy is not None:
        figures = f", test error {100 - stage.result.test_accuracy:.2f} %"
    print(f"{stage.name}: {stage.result.task}, {stage.seconds:.0f} s{figures}", flush=True)


class Shown:
    """Shows the progress of the stages, one after the other."""

    def __init__(self, progress: ProgressDisplay, workers: int) -> None:
        self.progress, self.workers, self.stage = progress, workers, ""

    def __call__(self, event: dict[str, Any]) -> None:
        if event["stage"] != self.stage:
            self.stage = event["stage"]
            self.progress.start(self.stage, self.workers)
        self.progress.update(event)


def dreams(net: DBNClassifier, x: torch.Tensor) -> Dreams:
    torch.manual_seed(0)
    seen = [x, *(net.net_.dream(x, steps) for steps in DREAM_STEPS)]
    return Dreams((0, *DREAM_STEPS), [pictures.view(-1, 28, 28) for pictures in seen])


def main() -> None:
    args = arguments()
    data = load(MNIST, shape=(784,), mean=0.0, std=1.0)
    fifth = max(1, args.finetune // 5)
    with ProgressDisplay() as progress:
        net = DBNClassifier(
            layers=tuple(int(units) for units in args.layers.split("-")),
            epochs=args.epochs,
            lr=args.pretrain_lr,
            finetune=args.finetune,
            finetune_lr=args.lr,
            finetune_lower=f"3@{2 * fifth},3@{3 * fifth},3@{4 * fifth}",
            dropout=args.dropout,
            input_dropout=args.input_dropout,
            strategy=args.strategy,
            workers=args.workers,
            codec=args.codec,
            transport=args.transport,
            device=args.device,
            seed=args.seed,
            checkpoint=args.checkpoint,
            every=2000 if args.checkpoint else None,
            on_stage=tell,
            on_progress=Shown(progress, args.workers),
        )
        net.fit(data.x, data.y, data.test_x, data.test_y)
    if args.finetune:
        print(f"test error {100 - 100 * net.score(data.test_x, data.test_y):.2f} %")
    if args.report:
        stages = {stage.name: stage.record() for stage in net.stages_}
        filters = net.net_.weights()["layer1.weight"].view(-1, 28, 28)
        title = f"Deep belief network on MNIST, 784-{args.layers}-10"
        path = write_gallery(args.report, title, stages, filters, dreams(net, data.test_x[:17]))
        print(f"report: {path}")


if __name__ == "__main__":
    main()
