"""Below everything else: errors, the gate for files, and records of options. Nothing of a lecture is here."""
