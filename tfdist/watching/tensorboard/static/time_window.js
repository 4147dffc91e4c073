// SPDX-License-Identifier: Apache-2.0
// The window of time that all panels show: zoom and pan by wheel, drag, keyboard and buttons.

const MIN_SECS = 1e-5;

export class TimeWindow {
  constructor(changed) {
    this.changed = changed;
    this.low = 0;
    this.high = 1;
    this.begin = 0;
    this.end = 1;
    this.drag = null;
    // True after a drag, whose end is no click.
    this.dragged = false;
  }

  setLimits(low, high, reset) {
    const margin = Math.max(high - low, MIN_SECS) * 1e-9;
    const showedAll = this.begin <= this.low && this.end >= this.high;
    this.low = low;
    this.high = high + margin;
    if (reset || showedAll) { this.begin = this.low; this.end = this.high; }
  }

  get length() { return this.end - this.begin; }

  set(begin, end) {
    const length = Math.min(Math.max(end - begin, MIN_SECS), this.high - this.low);
    const middle = (begin + end) / 2;
    const all = length >= (this.high - this.low) * (1 - 1e-9);
    const from = all ? this.low : Math.min(Math.max(middle - length / 2, this.low), this.high - length);
    const to = all ? this.high : from + length;
    if (from === this.begin && to === this.end) return;
    this.begin = from;
    this.end = to;
    this.changed();
  }

  fit() { this.set(this.low, this.high); }

  // `factor` < 1 zooms in; the time at `part` of the width stays where it is.
  zoom(factor, part = 0.5) {
    const anchor = this.begin + this.length * part;
    const length = Math.min(Math.max(this.length * factor, MIN_SECS), this.high - this.low);
    this.set(anchor - length * part, anchor + length * (1 - part));
  }

  pan(part) { this.set(this.begin + this.length * part, this.end + this.length * part); }

  // Returns true if the key was one of ours.
  key(event) {
    const actions = {
      '+': () => this.zoom(0.5), '=': () => this.zoom(0.5), '-': () => this.zoom(2), 'w': () => this.zoom(0.5),
      's': () => this.zoom(2), 'a': () => this.pan(-0.25), 'd': () => this.pan(0.25),
      'ArrowLeft': () => this.pan(-0.25), 'ArrowRight': () => this.pan(0.25), '0': () => this.fit(),
      'Home': () => this.set(this.low, this.low + this.length), 'End': () => this.set(this.high - this.length, this.high),
    };
    const action = actions[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return false;
    action();
    event.preventDefault();
    return true;
  }

  // Lets wheel and drag on `node` move the window; `plot()` returns left edge and width of the time axis in it.
  listen(node, plot) {
    const part = event => (event.offsetX - plot().left) / plot().width;
    node.addEventListener('wheel', event => {
      // Over the names of the lanes the wheel scrolls the page.
      if (event.offsetX < plot().left) return;
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        this.pan((event.deltaX || event.deltaY) / plot().width);
      } else {
        this.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * 0.0025))), part(event));
      }
    }, {passive: false});
    node.addEventListener('pointerdown', event => {
      if (event.button !== 0) return;
      this.drag = {x: event.clientX, begin: this.begin, end: this.end};
      this.dragged = false;
      node.setPointerCapture(event.pointerId);
    });
    node.addEventListener('pointermove', event => {
      if (!this.drag) return;
      if (Math.abs(event.clientX - this.drag.x) > 4) this.dragged = true;
      const moved = (this.drag.x - event.clientX) / plot().width * this.length;
      this.set(this.drag.begin + moved, this.drag.end + moved);
    });
    for (const name of ['pointerup', 'pointercancel']) node.addEventListener(name, () => { this.drag = null; });
    node.addEventListener('dblclick', event => this.zoom(0.25, part(event)));
  }
}
