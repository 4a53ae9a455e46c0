"""Words and names for made-up facts."""

_WORDS = """
    Acorn Album Almond Amazon Anchor Angel Apple Apricot April Arrow Autumn Badge Bamboo Banana
    Basket Beach Beacon Beaver Berry Bicycle Bishop Blanket Blossom Bottle Boulder Branch Bread
    Breeze Brick Bridge Bright Bronze Brush Bubble Bucket Butter Button Cabin Cactus Camel Camera
    Candle Canyon Captain Carpet Carrot Castle Cedar Cello Chain Chair Cherry Chess Chewy Chicken
    Circle Cliff Clock Cloud Clover Coast Cobalt Cocoa Coffee Comet Copper Coral Cotton Crane
    Cricket Crown Crystal Curtain Daisy Dancer Desert Diamond Dinner Doctor Dolphin Donkey Dragon
    Dream Driver Eagle Early Earth Elbow Elephant Ember Engine Envelope Falcon Family Farmer
    Feather Fiddle Finger Flame Flower Flute Forest Fountain Fox Frozen Garden Garlic Gentle Ginger
    Glacier Golden Grape Granite Guitar Hammer Harbor Harvest Hazel Helmet Heron Hidden Hollow
    Honey Horizon Hunter Island Ivory Jacket Jasmine Jelly Jewel Jungle Kettle Kitchen Kitten
    Ladder Lagoon Lantern Lemon Leopard Letter Library Lily Lion Lizard Lotus Lucky Magnet Mango
    Maple Marble Market Meadow Melon Merry Meteor Mirror Monkey Moon Morning Mountain
    Muffin Music Needle Nickel Night Noble Ocean Olive Onion Orange Orchard Otter Oyster Paddle
    Palace Panther Paper Parrot Peach Pearl Pebble Pencil Pepper Piano Pickle Pilot Planet Pocket
    Polar Poppy Potato Prairie Pumpkin Puzzle Quartz Quiet Rabbit Radio Rainbow Raven Ribbon River
    Robin Rocket Ruby Saddle Saffron Sailor Salmon Sapphire Shadow Silent Silver Singer Snow Spider
    Spring Squirrel Station Summer Sunny Swan Table Teacup Temple Thunder Tiger Timber Tomato
    Tower Trumpet Tulip Turtle Valley Velvet Violet Violin Walnut Water Whale Whisper Willow Window
    Winter Wizard Wolf Yellow Zebra
"""
WORDS = tuple(_WORDS.split())

_NAMES = """
    Adam Alice Anna Arthur Bella Boris Carla Cecil Clara Daniel David Diana Edith Elena Emil Emma
    Felix Fiona Frank George Grace Hannah Harold Helen Igor Irene Jack Jane Julia Karl Kate Laura
    Leo Linda Lucy Marco Maria Martin Nina Oliver Oscar Paula Peter Rosa Ruth Simon Sofia Thomas
    Ursula Victor Walter Zoe
"""
NAMES = tuple(_NAMES.split())

_CODE_WORDS = """
    abido batemi corula dalevo egitan feroka gumila hanivo ilatem jopera kalidu lemova
    mirado novika olitem parugo quimela rasivo sidola tuvena ulimar vodega wetila
    xarumi yolave zemira
"""
CODE_WORDS = tuple(_CODE_WORDS.split())

_CITIES = """
    Amsterdam Athens Berlin Boston Cairo Chicago Copenhagen Dublin Geneva Helsinki Istanbul Lisbon
    London Madrid Milan Moscow Oslo Paris Prague Rome Stockholm Sydney Tokyo Toronto Vienna Warsaw
"""
CITIES = tuple(_CITIES.split())

_INSTRUMENTS = """
    accordion banjo bassoon cello clarinet drum fiddle flute guitar harmonica harp horn lute oboe
    organ piano saxophone trombone trumpet tuba viola violin
"""
INSTRUMENTS = tuple(_INSTRUMENTS.split())

_MONTHS = """
    January February March April May June July August September October November December
"""
MONTHS = tuple(_MONTHS.split())
