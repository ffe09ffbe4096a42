"""The page at /kvortex/dashboard. Its parts lie beside this file; `page` puts them into one document."""
