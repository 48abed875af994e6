"""Pages and tables about runs: one run or its seeds in a report, several runs beside each other."""
