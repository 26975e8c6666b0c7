// The curves of a run over another axis, and their values under the pointer. Without it they stand, over steps.
(() => {
  const root = document.querySelector(".curves");
  if (!root) return;
  const { box: [W, H, left, top, bottom], right, xs, marks } = JSON.parse(root.dataset.curves);
  const panels = [...root.querySelectorAll(".panel")].map((el) => ({ el, ...JSON.parse(el.dataset.panel) }));
  const svg = (name, values) => {
    const made = document.createElementNS(panels[0].el.querySelector("svg").namespaceURI, name);
    for (const key in values) made.setAttribute(key, values[key]);
    return made;
  };
  const short = (v) => {
    const sizes = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];
    for (const [size, letter] of sizes) if (Math.abs(v) >= size * 0.9995) return +(v / size).toPrecision(3) + letter;
    return v && Math.abs(v) < 1e-3 ? v.toExponential(2) : String(+v.toPrecision(4));
  };
  const nice = (low, high, count) => {
    const power = 10 ** Math.floor(Math.log10((high - low) / count));
    const step = [1, 2, 5, 10].map((f) => f * power).find((s) => (high - low) / s <= count);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
    return found;
  };
  let axis = "steps", low = 0, high = 1;
  const x = (v) => left + ((v - low) / (high - low)) * (W - left - right);
  // A step on the axis that is shown, between the two points around it.
  const onAxis = (step) => {
    const steps = xs.steps[0], to = xs[axis][0];
    const after = steps.findIndex((s) => s >= step);
    if (after <= 0) return to[after < 0 ? to.length - 1 : 0];
    const part = (step - steps[after - 1]) / (steps[after] - steps[after - 1]);
    return to[after - 1] + part * (to[after] - to[after - 1]);
  };

  const redraw = () => {
    const all = xs[axis];
    low = Math.min(...all.map((each) => each[0]));
    high = Math.max(...all.map((each) => each[each.length - 1]));
    if (high <= low) high = low + 1;
    for (const { el, y: [bottomValue, topValue], lines } of panels) {
      const y = (v) => top + ((topValue - v) / (topValue - bottomValue)) * (H - top - bottom);
      lines.forEach(([grid, values], i) => {
        const places = values.map((v, k) => x(all[grid][k]).toFixed(1) + " " + y(v).toFixed(1));
        el.querySelectorAll(".line")[i].setAttribute("d", "M" + places.join("L"));
        const dots = el.querySelectorAll(".dots")[i];
        if (dots.getAttribute("d")) dots.setAttribute("d", places.map((p) => "M" + p + "h0").join(""));
      });
      const ticks = nice(low, high, 5).filter((t) => axis !== "steps" || Number.isInteger(t));
      el.querySelector(".x").replaceChildren(...ticks.map((t) => {
        const made = svg("text", { x: x(t), y: H - 6, "text-anchor": "middle" });
        made.textContent = short(t);
        return made;
      }));
      marks.forEach((step, i) => {
        const place = x(onAxis(step));
        const line = el.querySelectorAll(".mark")[i];
        line.setAttribute("x1", place);
        line.setAttribute("x2", place);
      });
    }
    root.querySelector(".axis").textContent = axis;
  };

  const nearest = (list, v) => {
    let best = 0;
    list.forEach((each, i) => { if (Math.abs(each - v) < Math.abs(list[best] - v)) best = i; });
    return best;
  };
  // `v`: a place on the axis; every panel says what it was there.
  const read = (v) => {
    for (const { el, lines, loss } of panels) {
      const said = lines.map(([grid, values, name]) => {
        const at = nearest(xs[axis][grid], v);
        const beside = loss ? ` (perplexity ${short(Math.exp(values[at]))})` : "";
        return (lines.length > 1 ? name + " " : "") + short(values[at]) + beside;
      });
      el.querySelector(".readout").textContent = said.join(", ");
      const grid = lines[0][0], place = x(xs[axis][grid][nearest(xs[axis][grid], v)]);
      const cursor = el.querySelector(".cursor");
      cursor.setAttribute("x1", place);
      cursor.setAttribute("x2", place);
      cursor.style.display = "";
    }
    const at = nearest(xs[axis][0], v);
    root.querySelector(".where").textContent = "step " + Math.round(xs.steps[0][at])
      + (xs.tokens ? ", " + short(xs.tokens[0][at]) + " tokens" : "")
      + (xs.hours ? ", " + short(xs.hours[0][at]) + " h" : "");
  };
  const clear = () => {
    for (const { el } of panels) {
      el.querySelector(".readout").textContent = "";
      el.querySelector(".cursor").style.display = "none";
    }
    root.querySelector(".where").textContent = "";
  };
  for (const { el } of panels) {
    const figure = el.querySelector("svg");
    const follow = (event) => {
      const area = figure.getBoundingClientRect();
      const place = ((event.clientX - area.left) / area.width) * W;
      read(low + ((place - left) / (W - left - right)) * (high - low));
    };
    figure.addEventListener("pointermove", follow);
    figure.addEventListener("pointerdown", follow);
    figure.addEventListener("pointerleave", clear);
  }
  for (const input of root.querySelectorAll("input[name=axis]")) {
    const known = input.value in xs;
    input.parentElement.hidden = !known;
    input.addEventListener("change", () => { axis = input.value; clear(); redraw(); });
  }
  root.classList.add("live");
  redraw();
})();
