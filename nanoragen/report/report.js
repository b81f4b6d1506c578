"use strict";
// Chooses which episode is seen; all of them are in the page. Four names, each narrowed by the ones before it.
const box = document.getElementById("viewer");

if (box) {
  const all = [...box.querySelectorAll("article")];
  const picks = [...box.querySelectorAll("select")].filter((s) => s.name !== "colour");
  const colour = box.querySelector("select[name=colour]"), buttons = [...box.querySelectorAll("button")];
  let at = all.findIndex((a) => !a.hidden);

  const same = (a, depth) => picks.slice(0, depth).every((s) => a.dataset[s.name] === all[at].dataset[s.name]);

  function show(n) {
    all[at].hidden = true;
    at = n;
    all[at].hidden = false;
    picks.forEach((pick, depth) => {
      const values = new Set(all.filter((a) => same(a, depth)).map((a) => a.dataset[pick.name]));
      pick.replaceChildren(...[...values].map((v) => new Option(v, v)));
      pick.value = all[at].dataset[pick.name];
    });
    for (const b of buttons) b.disabled = !all[at + Number(b.value)];
  }

  picks.forEach((pick, depth) => pick.addEventListener("change", () =>
    show(all.findIndex((a) => same(a, depth) && a.dataset[pick.name] === pick.value))));
  for (const b of buttons) b.addEventListener("click", () => show(at + Number(b.value)));
  if (colour) colour.addEventListener("change", () => { box.className = colour.value; });
  box.addEventListener("keydown", (k) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[k.key];
    if (!by || k.target.tagName === "SELECT" || !all[at + by]) return;
    k.preventDefault();
    show(at + by);
  });
  show(at);
}
