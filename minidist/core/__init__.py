"""core: the ground floor: arithmetic of layouts, process groups, collectives and the tape they leave."""
