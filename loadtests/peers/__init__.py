"""The same ranking behind other people's servers, to be measured beside ours; one file each."""
