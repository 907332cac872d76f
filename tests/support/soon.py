"""Options by which strategies come together several times in ten steps."""

SOON = {
    "local": {"period": 3},
    "post_local": {"switch": 4, "period": 3},
    "bmuf": {"period": 3},
    "slowmo": {"period": 3},
    "diloco": {"period": 3},
    "streaming_diloco": {"period": 4, "fragments": 2, "overlap": 1},
    "sparse_loco": {"period": 3, "density": 0.5},
    "muloco": {"period": 3},
    "demo": {"kept": 2},
    "async_diloco": {"period": 3},
    "decoupled_diloco": {"period": 4, "fragments": 2, "overlap": 1},
    "halos": {"period": 3, "exchange": 2},
    "noloco": {"period": 3},
    "easgd": {"period": 2},
    "eamsgd": {"period": 2},
}
SILENT = ("single", "ensemble")  # nothing is sent
