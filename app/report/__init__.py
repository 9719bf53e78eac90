"""One self-contained HTML page from a command's JSON: no network, no script, inline SVG."""
