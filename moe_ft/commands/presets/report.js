// What moves with the pointer; the page is complete without it.
"use strict";
const LEFT = 230, WIDTH = 528;
const reading = document.getElementById("reading");

// A line under the pointer, and what is there in words.
for (const drawing of document.querySelectorAll("svg[data-to]")) {
  const {from, to, unit, rows, row} = drawing.dataset;
  const names = rows ? rows.split("\n") : [];
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("class", "pointer");
  drawing.append(line);
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.viewBox.baseVal, place = drawing.getBoundingClientRect();
    const x = (event.clientX - place.left) * box.width / place.width;
    const y = (event.clientY - place.top) * box.height / place.height;
    if (x < LEFT || x > LEFT + WIDTH) return;
    line.setAttribute("d", `M${x} 0V${box.height - 24}`);
    const value = Number(from) + (Number(to) - Number(from)) * (x - LEFT) / WIDTH;
    const name = names[Math.floor(y / Number(row || 24))];
    const text = unit === "s" ? `${value.toPrecision(4)} s` : `${unit} ${Math.round(value)}`;
    reading.textContent = name ? `${name}, ${text}` : text;
    reading.style.display = "block";
  });
  drawing.addEventListener("pointerleave", () => {
    line.removeAttribute("d");
    reading.style.display = "none";
  });
}

// A click on a meaning hides what it names in the timeline.
for (const key of document.querySelectorAll("[data-kind]")) {
  const hide = () => {
    const isHidden = key.classList.toggle("off");
    key.setAttribute("aria-pressed", String(!isHidden));
    for (const each of document.querySelectorAll(`svg .${key.dataset.kind}`)) {
      each.style.display = isHidden ? "none" : "";
    }
  };
  key.tabIndex = 0;
  key.setAttribute("role", "button");
  key.setAttribute("aria-pressed", "true");
  key.addEventListener("click", hide);
  key.addEventListener("keydown", (event) => {
    if (event.key === "Enter") hide();
  });
}
