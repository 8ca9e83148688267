"""Images of your own: a folder with one folder for each class, from the files to a model that others may have.

The folder is made here, of scikit-learn's digits as PNG files. With ADADP_SHORT in the environment it trains for 20
steps only. On the command line the same is

    adadp train --dataset photos --classes even,odd --image-size 16x16 --test-fraction 0.1 --epsilon 2
    adadp predict RUN photos/odd
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

from adadp.training import prediction_inputs, run_folder, train

STEPS = 20 if "ADADP_SHORT" in os.environ else 600


def write_folder(folder: Path) -> None:
    """photos/even/0.png, photos/odd/1.png, ...: 1,797 images of 8 x 8 pixels."""
    digits = load_digits()
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        place = folder / ("odd" if digit % 2 else "even")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15.9375).astype("uint8"), mode="L").save(place / f"{number}.png")


with tempfile.TemporaryDirectory() as above:
    photos = Path(above) / "photos"
    write_folder(photos)
    result = train(
        dataset=str(photos),
        classes=["even", "odd"],  # declared, so that they are not read off people's files
        image_size="16x16",  # each image by itself; their size is then no statistic
        test_fraction=0.1,
        epsilon=2.0,
        delta=1e-4,
        steps=STEPS,
        out=str(Path(above) / "run"),
    )
    print(f"accuracy  {result.accuracy:.1%} on images held out: for your eyes, it is no private release")
    print(result.guarantee.to_text(80))

    # The run's folder has all that predicting needs; what may be published of it is in docs/threat-model.md.
    run = run_folder.read(result.folder)
    found = run.predict(prediction_inputs.read(photos / "odd" / "1.png", run))
    print(f"\nphotos/odd/1.png looks {run.classes[int(found[0])]}")
    # Another run on photos adds to the ledger that now lies beside it: photos.adadp-ledger.jsonl.
    print(f"on record: {sorted(path.name for path in Path(above).iterdir() if 'ledger' in path.name)}")
