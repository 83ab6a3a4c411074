"""bench: side by side with torch's own engines, in one run: equal losses first, then step time and bytes held as ratios."""
