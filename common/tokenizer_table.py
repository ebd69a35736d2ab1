"""A tokenizer's table as meta.json and checkpoints keep it: its characters, or the text of a tokenizer.json."""

import json

END = "ends_documents"  # key in a tokenizer.json for the end-of-text token that the user named


def without_end(table):
    """Return (the table without the key END, the name that END held or None)."""
    if not table or f'"{END}"' not in table:
        return table, None
    file = json.loads(table)
    named = file.pop(END, None)
    return json.dumps(file), named


def vocabulary(table):
    """Return a table in a form to compare: a tokenizer.json is parsed, and its key END is removed."""
    if table and table.startswith("{") and '"model"' in table:
        return json.loads(without_end(table)[0])
    return table
