"""A text that every language model of English finds likely, in which a model is checked on its own tokens."""

KNOWN_TEXT = (
    "The sun rises in the east and sets in the west. Water freezes at zero degrees and boils at one hundred degrees "
    "Celsius. Paris is the capital of France, and London is the capital of England. There are seven days in a week "
    "and twelve months in a year. Once upon a time, there was a little girl who lived in a small house near the forest "
    "with her mother and father. Every morning she went to school, and in the evening she came home and ate dinner "
    "with her family."
)
