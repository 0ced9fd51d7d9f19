"""Which samples are wrong: a table, the worst first, and a contact sheet."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import torch
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from linnaeus.data.contact_sheet import NUM_PICTURES, draw_contact_sheet
from linnaeus.data.image import load_image
from linnaeus.data.taxonomy import Taxonomy
from linnaeus.data.transforms import Preprocessing
from linnaeus.runtime.files import not_written, write_atomically


def sample_table(
    samples: tuple[Tensor, Tensor, list[int]], files: list[str], taxonomy: Taxonomy
) -> pd.DataFrame:
    """Return one line for each sample, the highest loss first; samples without a label come last.

    Args:
        samples: see `EvaluationMetrics.samples`. A rank has every `world_size`-th file.
        files: the path of each sample.
        taxonomy: levels and classes.
    """
    labels, log_p, counts = samples
    order = [n for rank in range(len(counts)) for n in range(rank, len(files), len(counts))]
    losses = torch.where(labels[..., :1] < 0, torch.nan, -log_p[..., :1].float())
    table = pd.DataFrame(
        {"path": [files[n] for n in order], "loss": losses.nanmean((1, 2)).tolist()}
    )
    for position, level in enumerate(taxonomy.levels):
        names = [*level.classes, ""]  # -1 is unknown
        for n, what in enumerate(("", "_predicted")):
            table[level.name + what] = [names[i] for i in labels[:, position, n].tolist()]
        table[f"{level.name}_probability"] = log_p[:, position, 1].float().exp().tolist()
    return table.sort_values("loss", ascending=False, na_position="last", kind="stable")


def write_samples(
    table: pd.DataFrame, taxonomy: Taxonomy, preprocessing: Preprocessing, path: Path
) -> Path:
    """Write the table, and the contact sheet beside it, whose path is returned.

    Pictures show images as the model reads them, before resizing: turned, and with values scaled alike.
    """
    text = table.to_csv(index=False) if path.suffix.lower() == ".csv" else None
    content = table.to_parquet(index=False) if text is None else text.encode()
    try:
        write_atomically(path, lambda file: file.write(content))
    except OSError as error:
        raise not_written(path, error) from error
    sheet, finest = path.with_name("worst.png"), taxonomy.levels[-1].name
    worst = table.head(NUM_PICTURES)
    captions = [
        f"{row[finest] or 'unknown'}\npredicted {row[f'{finest}_predicted']} "
        f"({row[f'{finest}_probability']:.0%})"
        for row in worst.to_dict("records")
    ]
    channels = preprocessing.channels
    images = (load_image(file, channels, preprocessing.decoding) for file in worst["path"])
    pictures = (to_pil_image(image[: 3 if channels >= 3 else 1]) for image in images)
    draw_contact_sheet(pictures, captions, f"highest loss: {path.name}", sheet)
    return sheet
