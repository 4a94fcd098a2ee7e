# Thin targets: what they do is in the playbooks, the scripts and the locks. Everything lands in .venv/ and .kvtrial/.
#   make experiment [ARGS='-e kvtrial_pairs=2']     make setup PYTHON=/usr/bin/python3.12
SHELL := /bin/bash
.DEFAULT_GOAL := experiment
.PHONY: setup test-setup experiment run-experiment test test-full lint lock bench-client bench-fleet bench-fleet-statistics bench-analysis bench-report reports clean

# Which Python makes .venv; empty: 3.11 if it is there, else 3.12 or 3.13, each with its own lock.
PYTHON ?=
BIN := .venv/bin
CAUSE := .kvtrial/cause

# make reports every failed recipe with a last line of its own. So the cause is kept in a file, the recipe ends well, and
# the target after it makes make end with the cause. Each step has a file of its own, which its next attempt removes, and
# which counts for nothing beside a later success.
end_with = $(if $(shell [ "$(2)" -nt $(1) ] || cat $(1) 2>/dev/null),$(error $(shell sed 's/\.$$//' $(1))))
keep = @mkdir -p .kvtrial && rm -f $(1); KVTRIAL_CAUSE_FILE=$(1) $(2) || [ -s $(1) ]

setup: .venv/setup-done
	$(call end_with,$(CAUSE)-setup,.venv/setup-done)

.venv/setup-done: pyproject.toml requirements/install.sh $(wildcard requirements/controller-*.txt)
	$(call keep,$(CAUSE)-setup,requirements/install.sh controller "$(PYTHON)")

test-setup: .venv/test-done
	$(call end_with,$(CAUSE)-test,.venv/test-done)
	@tests/install_browser.sh

.venv/test-done: .venv/setup-done $(wildcard requirements/test-*.txt) | setup
	$(call keep,$(CAUSE)-test,requirements/install.sh test)

experiment: run-experiment
	$(call end_with,$(CAUSE))

# trap: Ctrl-C is for the playbook, which has the last word. Status 2 without a cause: the options were not understood.
run-experiment: setup
	@mkdir -p .kvtrial && rm -f $(CAUSE)
	@trap : INT; status=0; KVTRIAL_CAUSE_FILE=$(CAUSE) $(BIN)/ansible-playbook experiment.yml $(ARGS) || status=$$?; \
	if [ $$status -gt 128 ]; then echo "The playbook was ended from outside; the same command goes on from there." >$(CAUSE); \
	elif [ $$status -eq 2 ] && [ ! -s $(CAUSE) ]; then \
		echo "ansible-playbook does not take ARGS=$$ARGS; $(BIN)/ansible-playbook --help lists what it takes." >$(CAUSE); \
	elif [ $$status -ne 0 ] && [ ! -s $(CAUSE) ]; then \
		echo "ansible-playbook ended with status $$status; its last lines say why." >$(CAUSE); fi

test: test-setup
	@tests/run.sh

test-full: test-setup
	@tests/run.sh full

lint: test-setup
	@tests/lint.sh

# QUICK=1: only kvtrial's client and the C reference, about a minute; make test runs that too. See tests/bench/README.md.
QUICK ?=
bench-client: test-setup
ifeq ($(QUICK),)
	@tests/bench/install_peers.sh
	@PYTHONPATH=tests $(BIN)/python -m bench.client
else
	@PYTHONPATH=tests $(BIN)/python -m bench.client --quick
endif

# Another release's lock: make lock VLLM=0.33.0. For a commit's wheel also WHEEL=FILE_OR_URL AS_OF=2026-07-30 OUTPUT=FILE.
lock: test-setup
	@PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python requirements/lock_engine.py $(VLLM) $(if $(WHEEL),--wheel $(WHEEL)) \
		$(if $(AS_OF),--as-of $(AS_OF)) $(if $(OUTPUT),--output $(OUTPUT))

# What provisions and campaigns cost the controller, over real hosts on this machine; needs root, and half an hour. One part
# alone: make bench-fleet PART="campaign 10"; see tests/bench/fleet.py.
PART ?= all
bench-fleet: test-setup
	@PYTHONPATH=analysis:tests $(BIN)/python tests/bench/fleet.py $(PART)

# Simulated fleets with known truth: coverage of the fleet's interval, and hosts called odd by mistake; minutes of one core.
bench-fleet-statistics: test-setup
	@OMP_NUM_THREADS=1 $(BIN)/python tests/bench/fleet_statistics.py

# Summaries, verdict, end and merge of a campaign of 1,000 hosts × 16 runs × 2,000 requests, and a look at 14 nights, generated: time and memory;
# half an hour of one core.
bench-analysis: test-setup
	@$(BIN)/python tests/bench/analysis.py $(if $(filter command line,$(origin HOSTS)),$(HOSTS)) $(if $(STEP),--step $(STEP))

# The committed reports of docs/results, drawn anew by this release.
reports: setup
	@$(BIN)/python docs/results/reports.py

# What a report takes to build for 100 hosts with 16 runs each, of several protocols; fails above 10 s and says for which.
bench-report: test-setup
	@PYTHONPATH=tests $(BIN)/python -m bench.report

# What campaigns found stays in results/; what they installed, in .kvtrial/, goes by playbooks/teardown.yml -e kvtrial_purge=true.
clean:
	rm -rf .venv build dist .ansible .mypy_cache .pytest_cache .ruff_cache .hypothesis kvtrial-vllm-*.tar.gz
