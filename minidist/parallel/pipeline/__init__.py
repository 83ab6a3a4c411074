"""Pipeline parallelism: a schedule is a list of small actions per rank, verified, timed, drawn and executed as it stands."""
