"""Pages: plain data in, one HTML file out. Nothing here loads a model or a data set.

:mod:`.plots` draws, :mod:`.curves` chooses what to draw from run reports, :mod:`.examples` holds queries with their
answers, and :mod:`.render` fills the templates, which hold the text.
"""
