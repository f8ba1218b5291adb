"""MSL as text: tokens, declarations, rules, edits, and a target for each compiler that is not Apple's."""
