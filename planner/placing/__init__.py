"""Where experts live: repair the carried placement, stop where asked (Sections 3.2 and 3.3)."""
