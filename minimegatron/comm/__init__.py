"""Who talks: the grid of ranks, the collectives, and the processes they run in."""
