"""The option that says which selection of packages this environment should hold."""


def pytest_addoption(parser):
    parser.addoption("--selection", default="none", choices=["none", "triton", "tilelang", "all"])
