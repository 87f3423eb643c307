// Values under the pointer, and copy buttons. The page is complete without it.
const SVG = "http://www.w3.org/2000/svg";

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][1] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - points[low - 1][1] < points[low][1] - x ? points[low - 1] : points[low];
}

for (const figure of document.querySelectorAll(".chart")) {
  const lines = JSON.parse(figure.querySelector("script").textContent).filter((l) => l.points.length);
  const svg = figure.querySelector("svg"), cursor = svg.querySelector(".cursor"), tip = figure.querySelector(".tip");
  const rule = cursor.querySelector("line");
  if (!lines.length) continue;
  const hide = () => { cursor.setAttribute("visibility", "hidden"); tip.hidden = true; };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), outer = figure.getBoundingClientRect();
    const zoom = box.width / svg.viewBox.baseVal.width;
    const x = (event.clientX - box.left) / zoom;
    const hits = lines.map((line) => ({ line, point: nearest(line.points, x) }));
    const first = hits.reduce((a, b) => (Math.abs(b.point[1] - x) < Math.abs(a.point[1] - x) ? b : a)).point;
    rule.setAttribute("x1", first[1]);
    rule.setAttribute("x2", first[1]);
    cursor.querySelectorAll("circle").forEach((dot) => dot.remove());
    const words = [Object.assign(document.createElement("b"), { textContent: `step ${first[0].toLocaleString("en")}` })];
    for (const { line, point } of hits) {
      const dot = document.createElementNS(SVG, "circle");
      dot.setAttribute("cx", point[1]);
      dot.setAttribute("cy", point[2]);
      dot.setAttribute("r", 4);
      dot.setAttribute("class", line.style);
      cursor.append(dot);
      const where = point[0] === first[0] ? "" : ` (step ${point[0].toLocaleString("en")})`;
      words.push(Object.assign(document.createElement("div"), { textContent: `${line.name} ${point[3]}${where}` }));
    }
    tip.replaceChildren(...words);
    tip.hidden = false;
    cursor.setAttribute("visibility", "visible");
    const left = box.left - outer.left + first[1] * zoom, width = tip.offsetWidth;
    tip.style.left = `${left + 14 + width > outer.width ? left - width - 14 : left + 14}px`;
    tip.style.top = `${box.top - outer.top + 10}px`;
  });
}

for (const button of document.querySelectorAll("button")) {
  button.addEventListener("click", async () => {
    const pre = button.parentElement.querySelector("pre");
    try {
      await navigator.clipboard.writeText(pre.textContent);
    } catch {
      getSelection().selectAllChildren(pre);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}
