"use strict";
// Comfort only: what marks say at once and under a finger, commands to copy, long tables to filter. The page is whole
// without it. Texts reach the page through textContent alone, never as markup.
(() => {
  const words = {{ words | tojson }};

  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("aria-hidden", "true");
  document.body.append(tip);
  const said = new WeakMap();
  for (const mark of document.querySelectorAll("svg g.mark")) {
    const title = mark.querySelector("title");
    if (!title) continue;
    said.set(mark, title.textContent);
    title.remove();
  }
  let shownMark = null;
  const show = (event) => {
    const mark = event.target instanceof Element ? event.target.closest("g.mark") : null;
    if (shownMark && shownMark !== mark) shownMark.classList.remove("on");
    shownMark = mark && said.has(mark) ? mark : null;
    tip.hidden = !shownMark;
    if (!shownMark) return;
    shownMark.classList.add("on");
    tip.textContent = said.get(shownMark);
    const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - tip.offsetWidth - 8);
    const above = event.clientY - tip.offsetHeight - 12;
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = (above > 8 ? above : event.clientY + 18) + "px";
  };
  document.addEventListener("pointermove", show, { passive: true });
  document.addEventListener("pointerdown", show, { passive: true });

  for (const command of document.querySelectorAll("pre.copy")) {
    if (!navigator.clipboard) break;
    const text = command.textContent;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = words.copy;
    button.addEventListener("click", () => navigator.clipboard.writeText(text).then(() => {
      button.textContent = words.copied;
      setTimeout(() => { button.textContent = words.copy; }, 1500);
    }, () => {}));
    const frame = document.createElement("div");
    frame.className = "command";
    command.replaceWith(frame);
    frame.append(command, button);
  }

  for (const table of document.querySelectorAll("table.long")) {
    const rows = [...table.tBodies].flatMap((body) => [...body.rows]);
    if (rows.length < 15) continue;
    const box = document.createElement("label");
    box.className = "filter";
    const input = document.createElement("input");
    input.type = "search";
    const count = document.createElement("span");
    count.setAttribute("role", "status");
    box.append(words.filter + " ", input, " ", count);
    input.addEventListener("input", () => {
      const wanted = input.value.toLowerCase();
      let left = 0;
      for (const row of rows) {
        row.hidden = !row.textContent.toLowerCase().includes(wanted);
        left += row.hidden ? 0 : 1;
      }
      count.textContent = left + " " + words.rows;
    });
    table.parentElement.before(box);
  }
})();
