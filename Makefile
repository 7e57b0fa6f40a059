# Two commands matter: `make serve` and `make test`. PIP_ARGS is passed to every pip install.
PYTHON ?= python3
VENV := .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: serve test test-system oracle load clients chaos soak lint install

install: $(STAMP)

$(STAMP): pyproject.toml constraints-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints-cpu.txt -e '.[dev]'
	touch $@

serve: install
	$(BIN)/pointsman serve $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Side by side what needs no cluster: one process more than there are cores, because many tests wait. Then what starts a
# real cluster, one after the other, and at last sixteen ranks, with nothing beside them.
# TRACES=DIR adds the tests that replay the request traces of that folder.
PYTEST = $(BIN)/python -m pytest $(if $(TRACES),--traces=$(TRACES)) $(PYTEST_ARGS)
USUAL = not slow and not gpu and not system
test: lint
	$(PYTEST) -m "not ray and $(USUAL)" -n auto --maxprocesses=4 --dist loadfile
	$(PYTEST) tests/integration -m "ray and not alone and $(USUAL)"
	$(PYTEST) tests/integration -m "ray and alone and $(USUAL)"

# Hosts made of network namespaces, `ray up` by ssh, sixteen ranks on four of them. Needs root; installs sshd and rsync.
test-system: install
	tests/system/packages.sh
	$(PYTEST) -m system

# Everything against transformers: hours; started again it goes on. ORACLE_ARGS=--quick for minutes.
oracle: install
	$(BIN)/python -m tests.oracle_matrix --out docs/oracle/whole.md --keep .oracle $(ORACLE_ARGS)

# A minute of chats and shared prefixes against HOST=http://…, or against a server of its own.
load: install
	$(BIN)/python -m loadtest --out docs/load.md $(if $(HOST),--host $(HOST)) $(LOAD_ARGS)

# Real clients, each installed into .clients/, against a server of its own, or URL=http://… that is idle.
clients: install
	$(BIN)/python -m tests.clients --out docs/clients.md $(if $(URL),--url $(URL)) $(CLIENTS_ARGS)

# Processes of a cell killed and frozen among streams, at seeded moments; as root also hosts and their network, in
# namespaces. Writes docs/chaos.md.
chaos: install
	$(BIN)/python -m tests.chaos --out docs/chaos.md $(CHAOS_ARGS)
	if [ "$$(id -u)" = 0 ]; then tests/system/packages.sh && \
	  $(BIN)/python -m tests.chaos.on_hosts --out docs/chaos.md $(HOST_CHAOS_ARGS); \
	  else echo "the part on hosts needs root: not run"; fi

# Half an hour of everything on a small cell, and what grows meanwhile; writes docs/soak.md. TRACES=DIR: with a real trace.
soak: install
	$(BIN)/python -m tests.soak $(if $(TRACES),--traces=$(TRACES)) --out docs/soak.md $(SOAK_ARGS)
