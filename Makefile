# Thin targets: what they do is in the playbooks, the scripts and the locks. Everything lands in .venv/ and .kvtrial/.
#   make experiment [ARGS='-e kvtrial_pairs=2']     make setup PYTHON=/usr/bin/python3.12
SHELL := /bin/bash
.DEFAULT_GOAL := experiment
.PHONY: setup experiment run-experiment test test-full lint lock bench-client bench-fleet clean

# Which Python makes .venv; empty: 3.11 if it is there, else 3.12 or 3.13, each with its own lock.
PYTHON ?=
BIN := .venv/bin
CAUSE := .kvtrial/cause

setup: .venv/setup-done

.venv/setup-done: pyproject.toml requirements/install.sh $(wildcard requirements/controller-*.txt)
	@requirements/install.sh controller $(PYTHON)

.venv/test-done: .venv/setup-done $(wildcard requirements/test-*.txt)
	@requirements/install.sh test

# make reports every failed recipe with a last line of its own. So the playbook's cause is kept in a file, and make is
# made to end with it.
experiment: run-experiment
	$(if $(wildcard $(CAUSE)),$(error $(shell sed 's/\.$$//' $(CAUSE))))

run-experiment: setup
	@mkdir -p .kvtrial && rm -f $(CAUSE)
	@status=0; KVTRIAL_CAUSE_FILE=$(CAUSE) $(BIN)/ansible-playbook experiment.yml $(ARGS) || status=$$?; \
	if [ $$status -gt 128 ]; then echo "The playbook was ended from outside; the same command goes on from there." >$(CAUSE); \
	elif [ $$status -ne 0 ] && [ ! -s $(CAUSE) ]; then \
		echo "ansible-playbook ended with status $$status; its last lines say why." >$(CAUSE); fi

test: .venv/test-done
	@tests/run.sh

test-full: .venv/test-done
	@tests/run.sh full

lint: .venv/test-done
	@tests/lint.sh

# QUICK=1: only kvtrial's client and the C reference, about a minute; make test runs that too. See tests/bench/README.md.
QUICK ?=
bench-client: .venv/test-done
ifeq ($(QUICK),)
	@tests/bench/install_peers.sh
	@PYTHONPATH=tests $(BIN)/python -m bench.client
else
	@PYTHONPATH=tests $(BIN)/python -m bench.client --quick
endif

# Another release's lock: make lock VLLM=0.33.0. For a commit's wheel also WHEEL=FILE_OR_URL AS_OF=2026-07-30 OUTPUT=FILE.
lock: .venv/test-done
	@PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python requirements/lock_engine.py $(VLLM) $(if $(WHEEL),--wheel $(WHEEL)) \
		$(if $(AS_OF),--as-of $(AS_OF)) $(if $(OUTPUT),--output $(OUTPUT))

# What a provision that changes nothing costs the controller, over HOSTS real hosts on this machine; needs root.
HOSTS ?= 10
bench-fleet: .venv/test-done
	@$(BIN)/python tests/bench/fleet.py $(HOSTS)

# What campaigns found stays in results/; what they installed, in .kvtrial/, goes by playbooks/teardown.yml -e kvtrial_purge=true.
clean:
	rm -rf .venv build dist .ansible .mypy_cache .pytest_cache .ruff_cache .hypothesis kvtrial-vllm-*.tar.gz
