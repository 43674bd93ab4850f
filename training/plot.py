"""Plots the calibration of the confidence head: `python -m training.plot REPORT.json OUT.svg`."""

import argparse
import json
from pathlib import Path
from typing import Any


def draw(report: dict[str, Any], out: Path) -> None:
    """Plot acceptance over the head's confidence for every prompt set with confidences."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(4.5, 4.5))
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, label="calibrated")
    for name, counted in report.items():
        if isinstance(counted, dict) and "calibration" in counted:
            bins = counted["calibration"]
            label = f"{name.split(',')[0]}: mean difference {bins['expected_calibration_error']:.3f}"
            axes.plot(bins["confidence"], bins["accepted"], marker="o", markersize=4, label=label)
    axes.set(xlabel="confidence of the head", ylabel="share of drafts accepted", xlim=(0, 1), ylim=(0, 1))
    axes.legend(loc="upper left", fontsize=8)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="report of training.run")
    parser.add_argument("out", type=Path, help="SVG file")
    arguments = parser.parse_args()
    draw(json.loads(arguments.report.read_text()), arguments.out)


if __name__ == "__main__":
    main()
