"""Draw 400 small photographs of flowers: eight species in three families, with a folder for each.

    python examples/flower_photos.py photos

`photos/asters/daisy/0001.jpg` is a daisy in the family of asters. Two species of roses differ only in the
number of petals, and one image in a hundred is in the wrong folder, as in real collections.
"""

import argparse
import math
import random
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter

SPECIES = {  # family/species: petals, width of a petal over its length, colors of petals and center
    "asters/daisy": (13, 0.22, (245, 245, 240), (240, 200, 40)),
    "asters/coneflower": (13, 0.22, (200, 90, 160), (120, 60, 30)),
    "asters/sunflower": (21, 0.18, (245, 190, 30), (90, 55, 25)),
    "roses/dog_rose": (5, 0.85, (240, 170, 190), (235, 210, 80)),
    "roses/field_rose": (6, 0.85, (240, 175, 190), (235, 210, 80)),
    "roses/cinquefoil": (5, 0.75, (245, 215, 60), (230, 180, 40)),
    "lilies/tiger_lily": (6, 0.35, (240, 120, 30), (120, 50, 20)),
    "lilies/white_lily": (6, 0.35, (250, 248, 240), (220, 200, 90)),
}
SIDE = 160


def near(color: tuple[int, int, int], chance: random.Random, spread: int) -> tuple[int, ...]:
    """Return a color that differs a little."""
    return tuple(max(0, min(255, part + chance.randint(-spread, spread))) for part in color)


def draw(species: str, chance: random.Random) -> Image.Image:
    """Return a photograph of this species: other light, place, size and angle each time."""
    num_petals, width, petals, center = SPECIES[species]
    meadow = near((60, 110, 50), chance, 35)
    image = Image.effect_noise((SIDE, SIDE), 60).convert("RGB")
    image = Image.blend(image, Image.new("RGB", (SIDE, SIDE), meadow), 0.75)
    x, y = (SIDE / 2 + chance.uniform(-25, 25) for _ in range(2))
    length, turn = chance.uniform(28, 55), chance.uniform(0, 2 * math.pi)
    canvas = ImageDraw.Draw(image)
    for petal in range(num_petals):
        angle = turn + 2 * math.pi * petal / num_petals + chance.gauss(0, 0.05)
        outline = []
        for step in range(24):
            around = 2 * math.pi * step / 24
            along = length * (0.55 + 0.45 * math.cos(around))
            across = length * width / 2 * math.sin(around)
            outline.append(
                (
                    x + along * math.cos(angle) - across * math.sin(angle),
                    y + along * math.sin(angle) + across * math.cos(angle),
                )
            )
        canvas.polygon(outline, fill=near(petals, chance, 14), outline=near(petals, chance, 40))
    radius = length * chance.uniform(0.16, 0.26)
    canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=near(center, chance, 15))
    return image.filter(ImageFilter.GaussianBlur(chance.uniform(0.3, 1.6)))


def main() -> None:
    """Write the photographs."""
    parser = argparse.ArgumentParser(description="Draw photographs of flowers into folders.")
    parser.add_argument("folder", type=Path, help="folder to write to")
    parser.add_argument("--number", type=int, default=400, help="number of photographs")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other photographs")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    for number in range(args.number):
        species = list(SPECIES)[number % len(SPECIES)]
        shown = chance.choice(list(SPECIES)) if chance.random() < 0.01 else species
        path = args.folder / species / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(shown, chance).save(path, quality=90)
    print(f"{args.number} photographs of {len(SPECIES)} species in {args.folder}")


if __name__ == "__main__":
    main()
