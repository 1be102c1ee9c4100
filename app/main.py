"""The app, run by ``resinspect app`` or ``streamlit run app/main.py -- [MODEL]...``: a page is a file."""

from pathlib import Path

import streamlit as st

st.set_page_config(page_title="resinspect", page_icon=str(Path(__file__).with_name("icon.svg")), layout="wide")
st.navigation([st.Page("routing.py", title="Routing map", icon=":material/grid_on:")]).run()
