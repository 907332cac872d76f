"""Which codec goes with which strategy, as the table in docs/codecs.md: made from what they themselves say.

python tests/codecs/pairs.py
"""

from shoal.codecs import CODECS
from shoal.strategies import STRATEGIES
from shoal.vocabulary.strategy import Setting


def refusal(strategy, codec):
    """The sentence with which a strategy refuses a codec; empty if it takes it."""
    try:
        STRATEGIES.make(strategy).check(Setting(1 if strategy == "single" else 4, CODECS.make(codec)))
    except ValueError as refused:
        return str(refused)
    return ""


def table():
    """Strategies below each other, codecs side by side; those that are refused are left empty."""
    codecs = [word for word in CODECS if word != "none"]
    rows = ["| | " + " | ".join(f"`{codec}`" for codec in codecs) + " |", "|---" * (len(codecs) + 1) + "|"]
    for strategy in STRATEGIES:
        cells = ["" if refusal(strategy, codec) else "x" for codec in codecs]
        rows.append(f"| `{strategy}` | " + " | ".join(cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
