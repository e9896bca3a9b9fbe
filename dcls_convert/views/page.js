// Draws the page from its data, which page.py puts into the page with this script.

"use strict";

const data = JSON.parse(document.getElementById("data").textContent);

// Read from a node: an address written here would look like a use of the network.
const SVG_NAMESPACE = document.getElementById("svg").namespaceURI;

// Lengths are in units of the drawing unless stated otherwise.
const DIGIT_WIDTH = 6.5;
const WINDOW_LEFT = 30;
const WINDOW_SIDE = 240; // the longer side of a window of positions
const WINDOW_DRAWING_WIDTH = 330;
// Layouts of the windows of heat maps and of moving positions: space above the window, length of
// the longest bar of a histogram, and smallest height of the window.
const HEAT_MAP = {top: 62, maxBar: 48, minHeight: 14};
const MOVING = {top: 58, maxBar: 44, minHeight: 20};
const KERNEL_SIDE = 200; // the longer side of the chosen kernel
const TILE_SIDE = 62; // pixels; approximate longer side of a tile
const TILE_GAP = 4; // pixels
const FIELD_SIDE = 300; // the longer side of a receptive field
const COST_WIDTH = 230; // of the longest bar
const COST_HEIGHT = 46; // of a stage: its name and its two bars
const MAX_COST_NAME = 40; // characters
const CHART = {width: 340, height: 190, top: 12, right: 12, bottom: 26};

const LINE_COLOURS = 8; // --c0 to --c7
const LINE_WIDTH = 1.8;
const WIDE_LINE_WIDTH = 4.5;
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];
const MAX_READ_LINES = 8; // number of lines of a chart whose values are shown below it
const FRAME_MILLISECONDS = 80;
// With a smaller share of elements outside the old kernel, the window cannot be judged.
const MIN_OUTSIDE = 0.01;
const OPEN_LAYERS = 2; // number of layers whose kernels are visible at first

// Functions that redraw what depends on the colour scheme.
const redraws = [];

// ---------------------------------------------------------------------------------------------
// Helpers: nodes
// ---------------------------------------------------------------------------------------------

// Sets attributes, appends children, and returns the node.
function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// Creates an HTML element.
function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

// Creates an SVG element.
function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG_NAMESPACE, tag), attributes, children);
}

// Creates a drawing of this size; the description is for screen readers.
function drawing(width, height, description, ...children) {
  const attributes = {
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": description,
  };
  return svg("svg", attributes, ...children);
}

// Creates text in a drawing.
function label(x, y, text, anchor = "middle", attributes = {}) {
  return svg("text", {x, y, "text-anchor": anchor, ...attributes}, text);
}

// Creates a paragraph for each text.
function paragraphs(texts) {
  return texts.map(text => el("p", {class: "soft"}, text));
}

// Creates an empty line of text, which will show what is under the pointer.
function emptyReadout() {
  return el("p", {class: "readout"}, "\u00a0");
}

// Calls onPoint with the pointer's x and y, in units of the drawing, whenever it moves.
function onPointerMove(node, onPoint) {
  node.addEventListener("pointermove", event => {
    const toDrawing = node.getScreenCTM().inverse();
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(toDrawing);
    onPoint(point.x, point.y);
  });
}

// Adds a section to the page, and a link to it at the top.
function section(title, ...children) {
  const id = title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  const node = el("section", {id}, el("h2", {}, title), ...children);
  document.querySelector("main").append(node);
  document.querySelector("nav").append(el("a", {href: `#${id}`}, title));
}

// ---------------------------------------------------------------------------------------------
// Helpers: numbers
// ---------------------------------------------------------------------------------------------

// Decodes base64 to integers of the given array type, and divides them by a factor.
function unpack(text, IntegerArray, factor) {
  const bytes = Uint8Array.from(atob(text), character => character.charCodeAt(0));
  const integers = new IntegerArray(bytes.buffer);
  return Float64Array.from(integers, integer => integer / factor);
}

// Returns the first cell of a side, counted from the kernel's centre.
function firstCell(side) {
  return -Math.floor(side / 2);
}

// Returns the largest count; 1 if all are 0, because counts are divided by it.
function largestCount(counts) {
  let largest = 1;
  for (const count of counts) {
    largest = Math.max(largest, count);
  }
  return largest;
}

// Writes a number with a typographic minus sign.
function signed(value) {
  const sign = value < 0 ? "\u2212" : "";
  return sign + Math.abs(value);
}

// Writes a number with at most this many decimals.
function fixed(value, digits) {
  return signed(Number(value.toFixed(digits)));
}

// Writes a number with two significant digits.
function twoDigits(value) {
  return value.toPrecision(2).replace("-", "\u2212");
}

// Writes a number with at most two significant digits, as short as possible.
function shortNumber(value) {
  if (value !== 0 && Math.abs(value) < 0.001) {
    return value.toExponential(1).replace("-", "\u2212");
  }
  return String(Number(value.toPrecision(2)));
}

// Writes 12345 as "12,345".
function grouped(count) {
  return count.toLocaleString("en");
}

// Writes "1 layer" or "2 layers".
function counted(count, noun) {
  const plural = count === 1 ? "" : "s";
  return `${grouped(count)} ${noun}${plural}`;
}

// Writes a share as a percentage.
function percent(share, digits = 1) {
  const number = (100 * share).toFixed(digits);
  return `${number}\u00a0%`;
}

// ---------------------------------------------------------------------------------------------
// Colours
// ---------------------------------------------------------------------------------------------

// Returns the current value of a variable of the style sheet.
function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Returns the current colour of a variable: [red, green, blue], each from 0 to 255.
function rgb(name) {
  const hexadecimal = css(name); // "#rrggbb"
  return [1, 3, 5].map(start => parseInt(hexadecimal.slice(start, start + 2), 16));
}

// Returns the colour at this share of the way from the first to the second.
function mixColours(first, second, share) {
  return first.map((value, i) => Math.round(value + (second[i] - value) * share));
}

// Returns a function from values between 0 and 1 to current colours.
function amountColours() {
  const low = rgb("--low");
  const mid = rgb("--mid");
  const high = rgb("--high");
  return value => {
    if (value < 0.5) {
      return mixColours(low, mid, 2 * value);
    }
    return mixColours(mid, high, 2 * value - 1);
  };
}

// Returns a function from values between -1 and 1 to current colours.
function signColours() {
  const minus = rgb("--minus");
  const zero = rgb("--card");
  const plus = rgb("--plus");
  return value => mixColours(zero, value < 0 ? minus : plus, Math.abs(value));
}

// Draws now, and again whenever the colours change.
function drawAndRegister(draw) {
  redraws.push(draw);
  draw();
}

// Returns the style of a line with the colour and the dashes of these indices.
function lineStyle(colour, dash, width = LINE_WIDTH) {
  return {
    stroke: `var(--c${colour % LINE_COLOURS})`,
    "stroke-dasharray": DASHES[dash % DASHES.length],
    fill: "none",
    "stroke-width": width,
  };
}

// ---------------------------------------------------------------------------------------------
// Pieces of drawings. A box is {x, y, width, height}.
// ---------------------------------------------------------------------------------------------

// Draws a canvas with a pixel for each value, row by row.
function raster(rows, columns, values, colourOf) {
  const canvas = el("canvas", {width: columns, height: rows});
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(columns, rows);
  for (let i = 0; i < rows * columns; i++) {
    const [red, green, blue] = colourOf(values[i]);
    pixels.data.set([red, green, blue, 255], 4 * i);
  }
  context.putImageData(pixels, 0, 0);
  return canvas;
}

// Creates an image with a pixel for each value, in the current colours.
function staticImage(box, rows, columns, values, colours) {
  const href = raster(rows, columns, values, colours()).toDataURL();
  return svg("image", {...box, preserveAspectRatio: "none", href});
}

// Creates an image with a pixel for each value, which is redrawn when the colours change.
function image(box, rows, columns, values, colours) {
  const node = svg("image", {...box, preserveAspectRatio: "none"});
  drawAndRegister(() => {
    const canvas = raster(rows, columns, values, colours());
    node.setAttribute("href", canvas.toDataURL());
  });
  return node;
}

// Draws the outline of a box.
function frame(box) {
  return svg("rect", {...box, class: "axis"});
}

// Draws a frame whose line lies within this width and height.
function innerFrame(width, height) {
  return frame({x: 0.5, y: 0.5, width: width - 1, height: height - 1});
}

// Draws the scale of colours, with texts at its ends.
function colourKey(x, y, width, lowText, highText) {
  const box = {x, y, width, height: 8};
  const shades = 64;
  const values = [];
  for (let i = 0; i < shades; i++) {
    values.push(i / (shades - 1));
  }
  return [
    image(box, 1, shades, values, amountColours),
    frame(box),
    label(x, y + 20, lowText, "start"),
    label(x + width, y + 20, highText, "end"),
  ];
}

// Draws a histogram that grows up from y; a bar of `largest` elements is `maxBar` long.
function barsAbove(counts, largest, x, y, width, maxBar) {
  const step = width / counts.length;
  return counts.map((count, i) => {
    const height = (maxBar * count) / largest;
    const box = {x: x + i * step, y: y - height, width: 0.92 * step, height};
    return svg("rect", {class: "bar", ...box});
  });
}

// Draws a histogram that grows to the right from x; a bar of `largest` elements is `maxBar` long.
function barsBeside(counts, largest, x, y, height, maxBar) {
  const step = height / counts.length;
  return counts.map((count, i) => {
    const width = (maxBar * count) / largest;
    const box = {x, y: y + i * step, width, height: 0.92 * step};
    return svg("rect", {class: "bar", ...box});
  });
}

// Returns the number of cells from one tick to the next.
function tickStep(cells) {
  if (cells > 24) return 8;
  if (cells > 12) return 4;
  if (cells > 6) return 2;
  return 1;
}

// Returns the ticks of an axis of cells, each with its `offset` from the start and its `text`.
function cellTicks(cells, length) {
  const first = firstCell(cells);
  const step = tickStep(cells);
  const ticks = [];
  for (let cell = first; cell < first + cells; cell++) {
    if (cell % step === 0) {
      const offset = ((cell - first + 0.5) * length) / cells;
      ticks.push({offset, text: signed(cell)});
    }
  }
  return ticks;
}

// Labels the cells below a horizontal axis.
function ticksBelow(cells, x, y, width) {
  const ticks = cellTicks(cells, width);
  return ticks.map(({offset, text}) => label(x + offset, y + 14, text));
}

// Labels the cells to the left of a vertical axis.
function ticksBeside(cells, x, y, height) {
  const ticks = cellTicks(cells, height);
  return ticks.map(({offset, text}) => label(x - 5, y + offset + 4, text, "end"));
}

// Creates a legend of lines, each with its name.
function lineLegend(names, styles) {
  const legend = el("ul", {class: "legend"});
  for (const [i, name] of names.entries()) {
    const line = svg("path", {d: "M0 5H26", ...styles[i]});
    const sample = drawing(26, 10, "", line);
    sample.setAttribute("aria-hidden", "true");
    legend.append(el("li", {}, sample, name));
  }
  return legend;
}

// ---------------------------------------------------------------------------------------------
// Windows of positions along the last two learnt axes. A single axis gives one row.
// ---------------------------------------------------------------------------------------------

// Lays out a window: its cells, its box in the drawing, and the longest bar beside it.
function windowLayout(size, {top, maxBar, minHeight}) {
  const columns = size.at(-1);
  const rows = size.length > 1 ? size.at(-2) : 1;
  const scale = WINDOW_SIDE / Math.max(rows, columns);
  const width = columns * scale;
  const height = Math.max(rows * scale, minHeight);
  const x = WINDOW_LEFT + (WINDOW_SIDE - width) / 2;
  return {columns, rows, hasRows: size.length > 1, maxBar, box: {x, y: top, width, height}};
}

// Draws ticks below the window, and beside it if it has rows.
function windowTicks({columns, rows, hasRows, box}) {
  const ticks = ticksBelow(columns, box.x, box.y + box.height, box.width);
  if (hasRows) {
    ticks.push(...ticksBeside(rows, box.x, box.y, box.height));
  }
  return ticks;
}

// Draws the histogram of columns above the window, and that of rows beside it if it has rows.
function marginals({hasRows, maxBar, box}, histograms, largestCounts) {
  const above = barsAbove(
    histograms.at(-1),
    largestCounts.at(-1),
    box.x,
    box.y - 4,
    box.width,
    maxBar,
  );
  if (!hasRows) {
    return above;
  }
  const beside = barsBeside(
    histograms.at(-2),
    largestCounts.at(-2),
    box.x + box.width + 4,
    box.y,
    box.height,
    maxBar,
  );
  return [...above, ...beside];
}

// Returns the start and the length of the `inner` cells in the middle of an axis, which has `cells`
// cells and is `length` long.
function centredSpan(cells, inner, length) {
  const cell = length / cells;
  return [((cells - inner) / 2) * cell, inner * cell];
}

// ---------------------------------------------------------------------------------------------
// Positions: a heat map of a tie group, with histograms
// ---------------------------------------------------------------------------------------------

// Says how many elements there are, and how many layers share them.
function elementsSentence(row) {
  let layers = "1 layer has";
  if (row.layers.length > 1) {
    layers = `${counted(row.layers.length, "layer")} share`;
  }
  const cells = row.dilated_size.join("x");
  const kernels = `${grouped(row.kernels)} kernels of ${row.kernel_count} elements`;
  return `${layers} ${counted(row.elements, "element")}: ${kernels} in ${cells} cells`;
}

// Judges whether the window is large enough.
function borderVerdict(picture) {
  if (picture.row.border_share > picture.even_share) {
    return "the window may be too small";
  }
  if (picture.outside > MIN_OUTSIDE) {
    return "the window is large enough";
  }
  return "too few are outside the old kernel to tell whether the window is large enough";
}

// Returns the sentences of statistics below a heat map.
function positionSentences(picture) {
  const row = picture.row;
  const spread = row.spread.map(side => side.toFixed(2)).join(" and ");
  const axes = picture.axes.join(" and ");
  const distance = row.mean_distance.toFixed(2);
  const border = percent(row.border_share);
  const even = percent(picture.even_share);
  const outside = percent(picture.outside);
  const overlap = percent(row.overlap_share);
  return [
    `Spread: ${spread} cells along ${axes}; mean distance ${distance} cells.`,
    `Border: ${border} of the elements; ${even} if spread evenly: ${borderVerdict(picture)}.`,
    `Outside the old kernel: ${outside} of the elements.`,
    `Overlap: ${overlap} of the elements have a near neighbour in their kernel.`,
  ];
}

// Draws the number of elements in each bin as colours, in the frame of the window.
function heatMap(picture, box, largest) {
  const shades = picture.heat.flat().map(count => Math.sqrt(count / largest));
  const columns = picture.heat[0].length;
  return [image(box, picture.heat.length, columns, shades, amountColours), frame(box)];
}

// Draws the extent of each old kernel in the middle of the window.
function oldExtents(picture, {columns, rows, box}) {
  return picture.old_kernel_sizes.map(extent => {
    const [left, width] = centredSpan(columns, extent.at(-1), box.width);
    let top = 0;
    let height = box.height;
    if (extent.length > 1) {
      [top, height] = centredSpan(rows, extent.at(-2), box.height);
    }
    const old = {x: box.x + left, y: box.y + top, width, height};
    const title = svg("title", {}, "extent of the old kernel");
    return svg("rect", {...old, class: "old"}, title);
  });
}

// Draws the keys of the colours and of the old kernels' extents.
function heatMapKey(y, largest) {
  return [
    ...colourKey(WINDOW_LEFT, y, 110, "0", `${grouped(largest)} in a bin`),
    svg("path", {d: `M160 ${y + 4}h22`, class: "old"}),
    label(188, y + 8, "old kernel's extent", "start"),
  ];
}

// Describes a heat map for screen readers.
function heatMapDescription(picture) {
  const size = picture.size.join(" x ");
  const extents = picture.old_kernel_sizes.map(extent => extent.join(" x ")).join(", ");
  const axes = picture.axes.slice(-2).join(" and ");
  return (
    `Heat map of ${picture.row.name}: elements in the window of ${size} cells, ` +
    `old kernel ${extents}; histograms along ${axes}`
  );
}

// Shows the cells and the count of the bin at x and y in the drawing, if there is a bin.
function showBin(readout, picture, {columns, rows, hasRows, box}, x, y) {
  const heat = picture.heat;
  const i = Math.floor(((x - box.x) / box.width) * heat[0].length);
  const j = Math.floor(((y - box.y) / box.height) * heat.length);
  if (i < 0 || j < 0 || i >= heat[0].length || j >= heat.length) {
    return;
  }
  const bins = picture.bins_per_cell;
  const column = firstCell(columns) + (i + 0.5) / bins - 0.5;
  let place = `${picture.axes.at(-1)} ${fixed(column, 1)}`;
  if (hasRows) {
    const row = firstCell(rows) + (j + 0.5) / bins - 0.5;
    place = `${picture.axes.at(-2)} ${fixed(row, 1)}, ${place}`;
  }
  readout.textContent = `${place}: ${grouped(heat[j][i])} elements`;
}

// Draws the elements of a tie group: a heat map with histograms, and statistics below it.
function positionsFigure(picture) {
  const layout = windowLayout(picture.size, HEAT_MAP);
  const box = layout.box;
  const bottom = box.y + box.height;
  const largest = largestCount(picture.heat.flat());
  const node = drawing(
    WINDOW_DRAWING_WIDTH,
    bottom + 66,
    heatMapDescription(picture),
    ...heatMap(picture, box, largest),
    ...marginals(layout, picture.histograms, picture.histograms.map(largestCount)),
    ...oldExtents(picture, layout),
    ...windowTicks(layout),
    label(box.x + box.width / 2, bottom + 27, `${picture.axes.at(-1)} (cells from the centre)`),
    ...heatMapKey(bottom + 40, largest),
  );
  const readout = emptyReadout();
  onPointerMove(node, (x, y) => showBin(readout, picture, layout, x, y));
  const figure = el("figure", {class: "joint"});
  figure.append(el("h3", {}, picture.row.name));
  figure.append(el("figcaption", {}, el("p", {}, elementsSentence(picture.row))));
  figure.append(node);
  if (picture.size.length > 2) {
    figure.append(firstAxisHistogram(picture));
  }
  const statistics = positionSentences(picture).map(sentence => el("p", {}, sentence));
  figure.append(el("figcaption", {}, readout, ...statistics));
  return figure;
}

// Draws the histogram along the first of three axes, which the heat map does not show.
function firstAxisHistogram(picture) {
  const counts = picture.histograms[0];
  const largest = largestCount(counts);
  const name = picture.axes[0];
  return drawing(
    WINDOW_DRAWING_WIDTH,
    84,
    `Histogram of ${picture.row.name} along ${name}`,
    ...barsAbove(counts, largest, WINDOW_LEFT, 54, WINDOW_SIDE, HEAT_MAP.maxBar),
    ...ticksBelow(picture.size[0], WINDOW_LEFT, 54, WINDOW_SIDE),
    label(WINDOW_LEFT + WINDOW_SIDE / 2, 81, `${name} (cells from the centre)`),
  );
}

// ---------------------------------------------------------------------------------------------
// Kernels: those of a layer as tiles, and the chosen one with its elements
// ---------------------------------------------------------------------------------------------

// The kernels of a layer as tiles on a canvas; beside them, the chosen kernel with its elements.
class LayerKernels {
  constructor(layer, factors) {
    this.layer = layer;
    this.count = layer.channels.length;
    [this.rows, this.columns] = layer.size;
    // Cells and weights are relative to the largest of their kernel.
    this.cells = unpack(layer.cells, Int8Array, factors.int8Max);
    this.weights = unpack(layer.weights, Int8Array, factors.int8Max);
    this.positions = unpack(layer.positions, Int16Array, factors.unitsPerCell);
    this.hasSeveralInputs = layer.channels.some(([, input]) => input > 0);

    const pixelsPerCell = TILE_SIDE / Math.max(this.rows, this.columns);
    const cellSide = Math.max(1, Math.round(pixelsPerCell));
    this.tileWidth = this.columns * cellSide;
    this.tileHeight = this.rows * cellSide;
    this.tilesInRow = 1; // until the width is known
    this.chosen = 0;

    this.canvas = el("canvas", {
      role: "img",
      tabindex: 0,
      "aria-label": `Kernels of ${layer.name}: ${this.countText()}. Arrow keys choose one.`,
    });
    this.tiles = el("div", {class: "tiles"}, this.canvas);
    this.chosenDrawing = el("div", {class: "chosen"});
    this.readout = el("p", {class: "readout", "aria-live": "polite"});
    this.listen();
    drawAndRegister(() => this.drawChosen());
    redraws.push(() => this.drawTiles());
    new ResizeObserver(() => this.drawTiles()).observe(this.tiles); // also draws them once now
  }

  // Says how many of the layer's kernels are shown.
  countText() {
    const {total, share} = this.layer;
    if (this.count === total) {
      return `all ${counted(this.count, "kernel")}`;
    }
    const energy = percent(share, 0);
    return `${this.count} of ${counted(total, "kernel")}, with ${energy} of the energy`;
  }

  // Creates the layer's figure, which can be opened and closed.
  node() {
    const side = el("div", {class: "side"}, this.chosenDrawing, this.readout);
    const figure = el("figure", {class: "layer"}, side, this.tiles);
    const summary = el("summary", {}, `${this.layer.name}: ${this.countText()}`);
    return el("details", {}, summary, figure);
  }

  // Lets the pointer, a click or an arrow key choose a kernel.
  listen() {
    this.canvas.addEventListener("pointermove", event => this.choosePointed(event));
    this.canvas.addEventListener("click", event => this.choosePointed(event));
    this.canvas.addEventListener("keydown", event => this.chooseByKey(event));
  }

  // Chooses the kernel under the pointer.
  choosePointed(event) {
    const column = Math.floor(event.offsetX / (this.tileWidth + TILE_GAP));
    const row = Math.floor(event.offsetY / (this.tileHeight + TILE_GAP));
    if (column < this.tilesInRow) {
      this.choose(row * this.tilesInRow + column);
    }
  }

  // Chooses a neighbour of the chosen kernel.
  chooseByKey(event) {
    const moves = {
      ArrowLeft: -1,
      ArrowRight: 1,
      ArrowUp: -this.tilesInRow,
      ArrowDown: this.tilesInRow,
    };
    const move = moves[event.key];
    if (move !== undefined) {
      event.preventDefault();
      this.choose(this.chosen + move);
    }
  }

  // Chooses the kernel of this index, if there is one.
  choose(kernel) {
    if (kernel < 0 || kernel >= this.count || kernel === this.chosen) {
      return;
    }
    this.chosen = kernel;
    this.drawChosen();
    this.drawTiles();
  }

  // Returns the cells of a kernel, row by row.
  cellsOf(kernel) {
    const area = this.rows * this.columns;
    return this.cells.subarray(kernel * area, (kernel + 1) * area);
  }

  // Returns the chosen kernel's elements. `share` is the weight relative to the kernel's largest
  // weight; row and column are in cells from the centre.
  chosenElements() {
    const elements = [];
    for (let i = 0; i < this.layer.elements; i++) {
      const index = this.chosen * this.layer.elements + i;
      elements.push({
        share: this.weights[index],
        weight: this.weights[index] * this.layer.largestWeights[this.chosen],
        row: this.positions[2 * index],
        column: this.positions[2 * index + 1],
      });
    }
    return elements;
  }

  // Draws all tiles on the canvas, in as many rows as the width requires.
  drawTiles() {
    const width = this.tiles.clientWidth;
    const stepX = this.tileWidth + TILE_GAP;
    const stepY = this.tileHeight + TILE_GAP;
    this.tilesInRow = Math.max(1, Math.floor((width + TILE_GAP) / stepX));
    const height = Math.ceil(this.count / this.tilesInRow) * stepY;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.imageSmoothingEnabled = false;
    const colours = signColours();
    for (let kernel = 0; kernel < this.count; kernel++) {
      const x = (kernel % this.tilesInRow) * stepX + TILE_GAP / 2;
      const y = Math.floor(kernel / this.tilesInRow) * stepY + TILE_GAP / 2;
      this.drawTile(context, kernel, x, y, colours);
    }
  }

  // Draws the tile of a kernel, with a frame.
  drawTile(context, kernel, x, y, colours) {
    const tile = raster(this.rows, this.columns, this.cellsOf(kernel), colours);
    context.drawImage(tile, x, y, this.tileWidth, this.tileHeight);
    const isChosen = kernel === this.chosen;
    context.strokeStyle = css(isChosen ? "--text" : "--line");
    context.lineWidth = isChosen ? 2 : 1;
    context.strokeRect(x - 0.5, y - 0.5, this.tileWidth + 1, this.tileHeight + 1);
  }

  // Draws the chosen kernel in pale colours, with its elements as dots.
  drawChosen() {
    const scale = KERNEL_SIDE / Math.max(this.rows, this.columns);
    const width = this.columns * scale;
    const height = Math.max(this.rows * scale, 12);
    const cellWidth = width / this.columns;
    const cellHeight = height / this.rows;
    const centreX = (0.5 - firstCell(this.columns)) * cellWidth;
    const centreY = (0.5 - firstCell(this.rows)) * cellHeight;
    const pale = this.cellsOf(this.chosen).map(share => 0.45 * share);
    const box = {x: 0, y: 0, width, height};
    const cross = `M${centreX - 4} ${centreY}h8M${centreX} ${centreY - 4}v8`;
    const node = drawing(
      width,
      height,
      `Elements of a kernel of ${this.layer.name}`,
      staticImage(box, this.rows, this.columns, pale, signColours),
      innerFrame(width, height),
      svg("path", {d: cross, class: "centre"}),
    );
    const elements = this.chosenElements();
    for (const element of elements) {
      const x = centreX + element.column * cellWidth;
      const y = centreY + element.row * cellHeight;
      node.append(this.elementDot(element, x, y));
    }
    this.chosenDrawing.replaceChildren(node);
    this.describeChosen(elements);
  }

  // Creates the dot of an element, which describes the element when the pointer enters it.
  elementDot({share, weight, row, column}, x, y) {
    const place = `row ${fixed(row, 2)}, column ${fixed(column, 2)}`;
    const text = `weight ${twoDigits(weight)} at ${place}`;
    const radius = 1.5 + 4 * Math.sqrt(Math.abs(share));
    const sign = weight < 0 ? "minus" : "plus";
    const dot = svg("circle", {cx: x, cy: y, r: radius, class: sign}, svg("title", {}, text));
    dot.addEventListener("pointerenter", () => {
      this.readout.textContent = text;
    });
    return dot;
  }

  // Describes the chosen kernel: its channels and its largest element.
  describeChosen(elements) {
    const [output, input] = this.layer.channels[this.chosen];
    let channels = `output channel ${output}`;
    if (this.hasSeveralInputs) {
      channels += `, input channel ${input}`;
    }
    let largest = elements[0];
    for (const element of elements) {
      if (Math.abs(element.share) > Math.abs(largest.share)) {
        largest = element;
      }
    }
    const place = `row ${fixed(largest.row, 1)}, column ${fixed(largest.column, 1)}`;
    this.readout.textContent =
      `Kernel of ${channels}: ${elements.length} elements, ` +
      `the largest ${twoDigits(largest.weight)} at ${place}.`;
  }
}

// ---------------------------------------------------------------------------------------------
// Effective receptive fields
// ---------------------------------------------------------------------------------------------

// Draws how much each pixel matters, on a logarithmic scale of this many decades.
function receptiveFieldFigure(receptiveField, decades, factors) {
  const [rows, columns] = receptiveField.size;
  const {name, what, sentence} = receptiveField;
  const values = unpack(receptiveField.values, Uint8Array, factors.uint8Max);
  const scale = FIELD_SIDE / Math.max(rows, columns);
  const width = columns * scale;
  const height = Math.max(rows * scale, 14);
  const keyWidth = Math.min(width, FIELD_SIDE);
  const lowest = `1e\u2212${decades} or less`;
  const node = drawing(
    width,
    height + 34,
    `Effective receptive field ${name.toLowerCase()}, of ${what}. ${sentence}`,
    image({x: 0, y: 0, width, height}, rows, columns, values, amountColours),
    innerFrame(width, height),
    ...colourKey(0, height + 10, keyWidth, lowest, "1, the largest"),
  );
  const readout = emptyReadout();
  onPointerMove(node, (x, y) => {
    const column = Math.floor((x / width) * columns);
    const row = Math.floor((y / height) * rows);
    if (column < 0 || row < 0 || column >= columns || row >= rows) {
      return;
    }
    const share = 10 ** ((values[row * columns + column] - 1) * decades);
    const [pixelRows, pixelColumns] = receptiveField.pixels;
    const pixelRow = Math.floor((row * pixelRows) / rows);
    const pixelColumn = Math.floor((column * pixelColumns) / columns);
    const place = `row ${pixelRow}, column ${pixelColumn}`;
    readout.textContent = `${place}: ${share.toPrecision(2)} of the largest`;
  });
  const caption = el("figcaption", {});
  caption.append(el("p", {}, `Of ${what}`), readout, el("p", {}, sentence));
  return el("figure", {class: "field"}, el("h3", {}, name), node, caption);
}

// ---------------------------------------------------------------------------------------------
// Costs
// ---------------------------------------------------------------------------------------------

// Removes the middle of a long name.
function shortName(name) {
  if (name.length <= MAX_COST_NAME) {
    return name;
  }
  return `${name.slice(0, 18)}\u2026${name.slice(-20)}`;
}

// Draws a bar with its text; `kind` is "before" or "after".
function costBar(y, width, text, kind) {
  return [
    svg("rect", {x: 1, y, width: Math.max(width, 1), height: 10, class: kind}),
    label(width + 8, y + 9, `${text} ${kind}`, "start"),
  ];
}

// Draws a cost of each stage, before and after.
function costFigure(chart) {
  let largest = 1;
  for (const row of chart.rows) {
    largest = Math.max(largest, row.before, row.after);
  }
  const scale = COST_WIDTH / largest;
  const parts = [];
  const summaries = [];
  for (const [i, row] of chart.rows.entries()) {
    const y = 8 + COST_HEIGHT * i;
    const [before, after] = row.labels;
    parts.push(label(0, y + 6, shortName(row.name), "start", {class: "strong"}));
    parts.push(...costBar(y + 11, scale * row.before, before, "before"));
    parts.push(...costBar(y + 24, scale * row.after, after, "after"));
    summaries.push(`${row.name} ${before} before, ${after} after`);
  }
  const description = `${chart.unit} by stage: ${summaries.join("; ")}`;
  const height = 14 + COST_HEIGHT * chart.rows.length;
  return el("figure", {}, el("h3", {}, chart.unit), drawing(340, height, description, ...parts));
}

// ---------------------------------------------------------------------------------------------
// Charts of lines. A chart is
// {title, unit, axis: "step" or "epoch", xValues: [number], names, styles, lines},
// where a line has a value for each of `xValues`, or null if the value is unknown.
// ---------------------------------------------------------------------------------------------

// Returns the largest known value; 1 if none is above 0.
function largestValue(lines) {
  let largest = 0;
  for (const value of lines.flat()) {
    if (value !== null) {
      largest = Math.max(largest, value);
    }
  }
  return largest || 1;
}

// Returns the limits of a chart, and functions from values to drawing units along both axes.
function chartScales(chart, levels) {
  const largest = levels.at(-1);
  const digits = Math.max(...levels.map(level => shortNumber(level).length));
  const left = 12 + DIGIT_WIDTH * digits;
  const right = CHART.width - CHART.right;
  const bottom = CHART.height - CHART.bottom;
  const begin = chart.xValues[0];
  const end = Math.max(chart.xValues.at(-1), begin + 1);
  return {
    left,
    right,
    bottom,
    begin,
    end,
    x: value => left + ((right - left) * (value - begin)) / (end - begin),
    y: value => bottom - ((bottom - CHART.top) * value) / largest,
  };
}

// Draws a horizontal line for each level, and the texts of both axes.
function chartAxes(chart, levels, scales) {
  const {left, right} = scales;
  const parts = [];
  for (const level of levels) {
    const y = scales.y(level);
    parts.push(svg("path", {d: `M${left} ${y}H${right}`, class: "axis"}));
    parts.push(label(left - 5, y + 4, shortNumber(level), "end"));
  }
  const base = CHART.height - 10;
  parts.push(label(left, base, scales.begin, "start"));
  parts.push(label(right, base, scales.end, "end"));
  parts.push(label((left + CHART.width) / 2, base, chart.axis));
  return parts;
}

// Draws a line with gaps where values are unknown; a value between two gaps is a dot.
function chartLine(chart, index, scales) {
  const line = chart.lines[index];
  const name = chart.names[index];
  const style = chart.styles[index];
  const parts = [];
  let path = "";
  for (const [i, value] of line.entries()) {
    if (value === null) {
      continue;
    }
    const x = scales.x(chart.xValues[i]);
    const y = scales.y(value);
    const begins = (line[i - 1] ?? null) === null;
    const ends = (line[i + 1] ?? null) === null;
    const command = begins ? "M" : "L";
    path += `${command}${x.toFixed(1)} ${y.toFixed(1)}`;
    if (begins && ends) {
      const dot = {cx: x, cy: y, r: 3, fill: style.stroke};
      parts.push(svg("circle", dot, svg("title", {}, name)));
    }
  }
  if (path !== "") {
    const round = {"stroke-linejoin": "round", "stroke-linecap": "round"};
    parts.push(svg("path", {d: path, ...style, ...round}, svg("title", {}, name)));
  }
  return parts;
}

// Returns the index of the values that are drawn nearest to x.
function nearestIndex(chart, scales, x) {
  let nearest = 0;
  let least = Infinity;
  for (const [i, value] of chart.xValues.entries()) {
    const distance = Math.abs(scales.x(value) - x);
    if (distance < least) {
      nearest = i;
      least = distance;
    }
  }
  return nearest;
}

// Writes the values of the first lines at an index.
function chartValues(chart, index) {
  const values = [];
  for (const [i, line] of chart.lines.slice(0, MAX_READ_LINES).entries()) {
    const value = line[index] ?? "not known";
    values.push(`${chart.names[i]} ${value}`);
  }
  return `${chart.axis} ${chart.xValues[index]}: ${values.join(", ")}`;
}

// Draws a chart, which shows the values under the pointer.
function chartFigure(chart) {
  const largest = largestValue(chart.lines);
  const levels = [0, 0.5 * largest, largest];
  const scales = chartScales(chart, levels);
  const span = `${chart.axis}s ${scales.begin} to ${scales.end}`;
  const names = chart.names.join(", ");
  const marker = svg("path", {class: "centre", d: ""});
  const node = drawing(
    CHART.width,
    CHART.height,
    `${chart.title} in ${chart.unit} over ${span}, for ${names}`,
    ...chartAxes(chart, levels, scales),
  );
  for (let index = 0; index < chart.lines.length; index++) {
    node.append(...chartLine(chart, index, scales));
  }
  node.append(marker);
  const readout = emptyReadout();
  onPointerMove(node, x => {
    const index = nearestIndex(chart, scales, x);
    marker.setAttribute("d", `M${scales.x(chart.xValues[index])} ${CHART.top}V${scales.bottom}`);
    readout.textContent = chartValues(chart, index);
  });
  const heading = el("h3", {}, `${chart.title} (${chart.unit})`);
  return el("figure", {}, heading, node, el("figcaption", {}, readout));
}

// ---------------------------------------------------------------------------------------------
// A record of training: charts, and moving positions
// ---------------------------------------------------------------------------------------------

// Draws the followed elements at one step; `coordinates` has a list for each learnt axis.
function followedDots(coordinates, {columns, rows, box}) {
  const dots = [];
  for (const [i, column] of (coordinates.at(-1) ?? []).entries()) {
    const row = coordinates.length > 1 ? coordinates.at(-2)[i] : 0;
    if (column === null || row === null) {
      continue;
    }
    const x = box.x + ((column - firstCell(columns) + 0.5) * box.width) / columns;
    const y = box.y + ((row - firstCell(rows) + 0.5) * box.height) / rows;
    dots.push(svg("circle", {r: 3, class: "plus", cx: x, cy: y}));
  }
  return dots;
}

// Says how many of the elements are drawn as dots.
function followedSentence(track) {
  const followed = track.frames[0];
  if (followed.length === 0) {
    return "This record has no individual elements, only histograms.";
  }
  let total = 0;
  for (const count of track.histograms[0][0]) {
    total += count;
  }
  const shares = `${grouped(followed[0].length)} of ${grouped(total)} elements`;
  return `${shares} as dots; bars count all.`;
}

// Creates the figure of one positions tensor, and `show`, which draws a step of its training.
function movingPositions(track) {
  const layout = windowLayout(track.size, MOVING);
  const box = layout.box;
  const size = track.size.join(" x ");
  const dots = svg("g");
  const bars = svg("g");
  const node = drawing(
    WINDOW_DRAWING_WIDTH,
    box.y + box.height + 30,
    `Followed elements of ${track.name} in their window of ${size} cells, ` +
      "and histograms of all elements",
    frame(box),
    bars,
    dots,
    ...windowTicks(layout),
  );
  const largestCounts = track.histograms.map(steps => largestCount(steps.flat()));

  // Draws a step.
  function show(index) {
    const histograms = track.histograms.map(steps => steps[index]);
    dots.replaceChildren(...followedDots(track.frames[index], layout));
    bars.replaceChildren(...marginals(layout, histograms, largestCounts));
  }

  const caption = el("figcaption", {}, followedSentence(track));
  const figure = el("figure", {class: "joint"}, el("h3", {}, track.name), node, caption);
  return {figure, show};
}

// A button and a slider that step through all pictures at once, and the number of the step.
class Player {
  constructor(steps, pictures) {
    this.steps = steps;
    this.pictures = pictures;
    this.last = steps.length - 1;
    this.timer = null; // set while it plays
    const range = {type: "range", min: 0, max: this.last, value: 0, "aria-label": "step"};
    this.slider = el("input", range);
    this.button = el("button", {type: "button"}, "Play");
    this.output = el("output");
    this.slider.addEventListener("input", () => {
      this.stop();
      this.show(Number(this.slider.value));
    });
    this.button.addEventListener("click", () => this.playOrStop());
    this.show(0);
  }

  // Creates the row of controls.
  node() {
    return el("div", {class: "player"}, this.button, this.slider, this.output);
  }

  // True if the last step is shown.
  isAtEnd() {
    return Number(this.slider.value) >= this.last;
  }

  // Draws a step of all pictures.
  show(index) {
    this.slider.value = index;
    this.output.textContent = `step ${this.steps[index]}`;
    for (const picture of this.pictures) {
      picture.show(index);
    }
  }

  // Stops if it plays; otherwise plays from the shown step, or from the first after the last.
  playOrStop() {
    if (this.timer !== null) {
      this.stop();
      return;
    }
    if (this.isAtEnd()) {
      this.show(0);
    }
    this.button.textContent = "Pause";
    this.timer = setInterval(() => this.advance(), FRAME_MILLISECONDS);
  }

  // Draws the next step, or stops after the last.
  advance() {
    if (this.isAtEnd()) {
      this.stop();
    } else {
      this.show(Number(this.slider.value) + 1);
    }
  }

  // Stops playing.
  stop() {
    clearInterval(this.timer);
    this.timer = null;
    this.button.textContent = "Play";
  }
}

// Draws a chart of one quantity of all tracks; values are multiplied by `factor`.
function trackChart(history, title, unit, key, factor, styles) {
  const lines = [];
  for (const track of history.tracks) {
    const line = track[key].map(value => {
      if (value === null) {
        return null;
      }
      return Number((factor * value).toPrecision(4));
    });
    lines.push(line);
  }
  const names = history.tracks.map(track => track.name);
  return chartFigure({title, unit, axis: "step", xValues: history.steps, names, styles, lines});
}

// Adds the section on positions during training.
function trainingSection(history, title) {
  const names = history.tracks.map(track => track.name);
  const styles = names.map((_, i) => lineStyle(i, i));
  const pictures = history.tracks.map(movingPositions);
  const notes =
    "Speed: mean distance that a coordinate moves per step. Spread: root mean square of the " +
    "coordinates from the centre, over all axes, in cells. Steps are the numbers passed to " +
    "PositionTracker.update.";
  const charts = [
    trackChart(history, "Speed", "cells per step", "speed", 1, styles),
    trackChart(history, "Spread", "cells", "spread", 1, styles),
    trackChart(history, "Elements at the border", "%", "border", 100, styles),
  ];
  section(
    title,
    ...paragraphs([notes]),
    lineLegend(names, styles),
    el("div", {class: "cards wide"}, ...charts),
    new Player(history.moving_steps, pictures).node(),
    el("div", {class: "cards"}, ...pictures.map(picture => picture.figure)),
  );
}

// ---------------------------------------------------------------------------------------------
// A comparison by training
// ---------------------------------------------------------------------------------------------

// Creates a row of a table; `tag` is "th" or "td".
function tableRow(cells, tag) {
  return el("tr", {}, ...cells.map(cell => el(tag, {}, cell)));
}

// Creates a table of texts.
function tableOf({headings, rows}) {
  const head = el("thead", {}, tableRow(headings, "th"));
  const body = el("tbody", {}, ...rows.map(row => tableRow(row, "td")));
  return el("div", {class: "wide-table"}, el("table", {}, head, body));
}

// Returns the style of a run: colours stand for networks, dashes for seeds. The curves of the first
// network are wider, so that they stay visible behind equal curves of other networks.
function runStyle(network, seed) {
  const width = network === 0 ? WIDE_LINE_WIDTH : LINE_WIDTH;
  return lineStyle(network, seed, width);
}

// Adds the section with the answer of a comparison.
function answerSection({sentences, tables, notes}) {
  section(
    "Answer",
    ...sentences.map(sentence => el("p", {}, el("strong", {}, sentence))),
    ...tables.map(tableOf),
    ...paragraphs(notes),
  );
}

// Adds the section with the curves of all runs.
function curvesSection({networks, seeds, runs, epochs, charts}) {
  const names = runs.map(({network, seed}) => `${networks[network]}, seed ${seeds[seed]}`);
  const styles = runs.map(({network, seed}) => runStyle(network, seed));
  const networkStyles = networks.map((_, network) => runStyle(network, 0));
  const seedNames = seeds.map(seed => `seed ${seed}`);
  const seedStyles = seeds.map((_, seed) => ({...lineStyle(0, seed), stroke: "var(--soft)"}));
  const figures = charts.map(chart => {
    return chartFigure({...chart, axis: "epoch", xValues: epochs, names, styles});
  });
  const note =
    "Colours tell networks apart, dashes tell seeds apart. " +
    `The wide lines are ${networks[0]}.`;
  section(
    "Curves",
    ...paragraphs([note]),
    lineLegend(networks, networkStyles),
    lineLegend(seedNames, seedStyles),
    el("div", {class: "cards wide"}, ...figures),
  );
}

// ---------------------------------------------------------------------------------------------
// Sections of a checkpoint
// ---------------------------------------------------------------------------------------------

// Adds the section with all positions.
function positionsSection() {
  const notes = [
    "A picture for each group of layers that share positions. Darker (lighter in dark mode) " +
      "means more elements (square-root scale). Bars along the sides are the histograms along " +
      "each axis.",
    "Spread: root mean square of the coordinates along each axis. Distance: mean distance. Both " +
      "from the kernel's centre, in cells. An element is at the border within " +
      `${data.margin} cells of the window's limit; if more elements lie there than an even ` +
      "spread would put, the window may be too small. Overlapping elements, closer than " +
      `${data.near} cell to another of their kernel, do much the same work; ` +
      "tuning.repulsive_loss pushes them apart. Near 100\u00a0% is normal right after a start " +
      "near the centre.",
  ];
  const figures = data.positions.map(positionsFigure);
  section(
    "Where the elements are",
    ...paragraphs(notes),
    el("div", {class: "cards"}, ...figures),
  );
}

// Adds the section with the effective receptive fields.
function receptiveFieldsSection() {
  const receptiveFields = data.receptiveFields;
  const figures = receptiveFields.maps.map(receptiveField => {
    return receptiveFieldFigure(receptiveField, receptiveFields.decades, data.factors);
  });
  section(
    "Effective receptive field",
    ...paragraphs(receptiveFields.notes),
    el("div", {class: "cards wide"}, ...figures),
  );
}

// Adds the section with the costs.
function costsSection() {
  const notes = [
    "The replaced convolutions by stage, before and after. Parameters include biases; shared " +
      "positions count in the first layer that uses them. The rest of the network keeps its " +
      `${data.untouched} parameters.`,
  ];
  if (data.macsNote) {
    notes.push(`MACs are not known: ${data.macsNote}`);
  }
  const figures = data.costs.map(costFigure);
  section("What it costs", ...paragraphs(notes), el("div", {class: "cards wide"}, ...figures));
}

// Creates a legend of the signs and sizes of weights.
function weightLegend() {
  const plus = svg("circle", {cx: 13, cy: 5, r: 4.5, class: "plus"});
  const minus = svg("circle", {cx: 13, cy: 5, r: 4, class: "minus"});
  return el(
    "ul",
    {class: "legend"},
    el("li", {}, drawing(26, 10, "", plus), "positive weight, blue cells"),
    el("li", {}, drawing(26, 10, "", minus), "negative weight, orange cells"),
    el("li", {}, "larger dots have larger weights; the cross is the kernel's centre"),
  );
}

// Adds the section with the kernels of all layers.
function kernelsSection() {
  const notes = [
    "Constructed kernels of each layer, those with the most energy (sum of squares) first. " +
      "Point at one, click it or use the arrow keys to see its elements. Each kernel has its " +
      "own scale.",
  ];
  if (data.volumes) {
    notes.push("Kernels of three axes are summed over the first.");
  }
  if (data.whyNotRebuilt) {
    notes.push(
      "The network was not rebuilt, so kernels are made from the stored weights, without any " +
        `weight standardisation: ${data.whyNotRebuilt}`,
    );
  }
  const layers = data.kernels.map(layer => new LayerKernels(layer, data.factors).node());
  for (const node of layers.slice(0, OPEN_LAYERS)) {
    node.open = true;
  }
  section("Kernels", ...paragraphs(notes), weightLegend(), ...layers);
}

// ---------------------------------------------------------------------------------------------
// The page
// ---------------------------------------------------------------------------------------------

// Adds title, facts, contents and footer around an empty main part.
function drawFrame() {
  const facts = el("dl", {class: "facts"});
  for (const [name, value] of data.facts) {
    facts.append(el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  }
  const title = el("h1", {}, data.title);
  const subtitle = el("p", {class: "soft"}, data.subtitle);
  document.title = data.title;
  document.body.append(
    el("header", {}, title, subtitle, facts),
    el("nav", {"aria-label": "Contents"}),
    el("main"),
    el("footer", {}, data.made),
  );
}

// Adds the sections of a comparison or of a checkpoint.
function drawSections() {
  if (data.comparison) {
    answerSection(data.comparison);
    curvesSection(data.comparison);
    for (const history of data.histories) {
      trainingSection(history, history.title);
    }
    return;
  }
  positionsSection();
  if (data.receptiveFields) {
    receptiveFieldsSection();
  }
  if (data.history) {
    trainingSection(data.history, "Training");
  }
  costsSection();
  kernelsSection();
}

drawFrame();
drawSections();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const draw of redraws) {
    draw();
  }
});
