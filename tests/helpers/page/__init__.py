"""A server of the page's data, and a browser that looks at the page."""
