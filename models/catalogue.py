"""The words of the invented shop: what it sells, brands that do not exist, kinds of shoppers."""

from __future__ import annotations

# category: kinds, variants, cheapest and dearest price in EUR
CATALOGUE: dict[str, tuple[tuple[str, ...], tuple[str, ...], int, int]] = {
    "running": (
        ("Trail running shoe", "Road running shoe", "Running vest", "Running tights"),
        ("men", "women", "wide fit"), 25, 180,
    ),
    "cycling": (
        ("Bike light", "Cycling jersey", "Pannier bag", "Bike pump", "Cycling helmet"),
        ("compact", "commuter", "touring"), 12, 220,
    ),
    "camping": (
        ("Two-person tent", "Sleeping bag", "Camping stove", "Headlamp", "Trekking pole"),
        ("light", "three-season", "winter"), 15, 320,
    ),
    "kitchen": (
        ("Cast-iron pan", "Chef's knife", "Mixing bowl", "Kettle", "Cutting board"),
        ("small", "medium", "large"), 9, 160,
    ),
    "coffee": (
        ("Hand grinder", "Pour-over set", "Espresso beans", "Milk pitcher", "Coffee scale"),
        ("classic", "travel", "barista"), 8, 190,
    ),
    "garden": (
        ("Pruning shears", "Watering can", "Raised bed", "Seed set", "Garden hose"),
        ("balcony", "terrace", "allotment"), 5, 140,
    ),
    "lighting": (
        ("Desk lamp", "Floor lamp", "String lights", "Pendant lamp", "Reading light"),
        ("warm white", "dimmable", "oak"), 12, 240,
    ),
    "bedding": (
        ("Linen duvet cover", "Down pillow", "Wool blanket", "Fitted sheet", "Mattress topper"),
        ("single", "double", "king size"), 19, 260,
    ),
    "audio": (
        ("Over-ear headphones", "Wireless earbuds", "Bookshelf speaker", "Turntable"),
        ("black", "silver", "walnut"), 29, 420,
    ),
    "stationery": (
        ("Dotted notebook", "Fountain pen", "Desk planner", "Pencil case", "Ink bottle"),
        ("A5", "A6", "gift box"), 4, 70,
    ),
    "toys": (
        ("Wooden train", "Building blocks", "Puzzle", "Plush bear", "Marble run"),
        ("from 2 years", "from 4 years", "from 8 years"), 8, 110,
    ),
    "skincare": (
        ("Day cream", "Face wash", "Sun lotion", "Lip balm", "Hand cream"),
        ("sensitive", "unscented", "refill"), 4, 60,
    ),
}  # fmt: skip
BRAND_STARTS = ("Bro", "Dru", "Fel", "Gro", "Hul", "Jav", "Klo", "Mur", "Nes", "Ost", "Pli", "Quo")
BRAND_ENDS = ("bek", "dant", "gosk")
# segment: the categories that it leans to
SEGMENTS = {
    "outdoors": ("running", "cycling", "camping", "garden"),
    "home": ("kitchen", "lighting", "bedding", "garden"),
    "gourmet": ("coffee", "kitchen"),
    "study": ("stationery", "lighting", "audio"),
    "family": ("toys", "skincare", "bedding"),
}
AGE_BANDS = ("18-24", "25-34", "35-49", "50-64", "65+")
