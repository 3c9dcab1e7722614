"""One file or folder, one page: `build(ui)` lays it out inside the site and wires its events."""
